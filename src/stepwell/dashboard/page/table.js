// A plain table: columns are [heading, cell(row), class], rows are values.

import { el } from "./dom.js";

export function table(caption, columns, rows, empty) {
  const head = el("tr", {}, columns.map(([name, , kind]) => el("th", { scope: "col", class: kind }, name)));
  const body = rows.map((row) => el("tr", {}, columns.map(([, cell, kind]) => el("td", { class: kind }, cell(row)))));
  const none = el("tr", {}, el("td", { colspan: columns.length, class: "none" }, empty));
  return el("table", { class: "plain" }, el("caption", {}, caption), el("thead", {}, head),
    el("tbody", {}, body.length ? body : none));
}
