// The list of trajectories: filters, a page of rows, and curation of the selected ones.
//
// Invariants: the rows are those of the last request. The server sorts and cuts the page, so a page costs the same with
// any number of trajectories.

import { get, isCancelled } from "./api.js";
import { CURATION_KEYS, curationKeys } from "./curation.js";
import { button, el, field, fill } from "./dom.js";
import { Filters } from "./filters.js";
import { count, plural } from "./format.js";
import { Picking } from "./picking.js";
import { adjust, link, toGroup, toTrajectory } from "./routes.js";
import { COLUMNS, row } from "./rows.js";

const PAGE = 100;
const SORTS = [
  ["newest", "newest first"], ["oldest", "oldest first"],
  ["-reward", "reward, high first"], ["reward", "reward, low first"],
  ["-tokens", "tokens, most first"], ["tokens", "tokens, fewest first"],
];

/** The state of the list when it was left. It is restored when the list is opened again. */
let lastParams = {};
const picking = new Picking();

export function lastList() {
  return link("trajectories", lastParams);
}

/** Moves the list's cursor to the next (or previous) trajectory and returns it, if there is one. */
export function neighbour({ trajectory_uid, prompt_uid }, by) {
  const at = picking.rows.findIndex((r) => r.trajectory_uid === trajectory_uid && r.prompt_uid === prompt_uid);
  if (at < 0) return undefined;
  picking.at = at;
  return picking.move(by) ? picking.current() : undefined;
}

export function open(shell, params) {
  return new Trajectories(shell, params);
}

class Trajectories {
  title = "Trajectories";
  every = 5000;
  legend = [
    ["j k", "down, up"], ["Enter", "open"], ["s", "its group, side by side"], ["x", "select"],
    ["X", "select the page, or none"], ["n p", "next, previous page"], ...CURATION_KEYS,
  ];

  constructor(shell, params) {
    this.shell = shell;
    this.filters = new Filters(() => this.changed());
    const options = SORTS.map(([value, text]) => el("option", { value }, text));
    this.sort = el("select", { onchange: () => this.changed() }, options);
    this.body = el("tbody", { onclick: (event) => this.clicked(event) });
    this.found = el("p", { class: "found", role: "status" });
    this.keys = this.bindings();
    this.pager = el("p", { class: "pager" });
    const parts = [this.filters.node, this.controls(), this.table()];
    this.node = el("section", { class: "list", "aria-label": "Trajectories" }, parts);
    this.take(params);
  }

  bindings() {
    const after = () => { picking.clear(); this.ask(); };
    return {
      j: () => this.move(1), k: () => this.move(-1), ArrowDown: () => this.move(1), ArrowUp: () => this.move(-1),
      Enter: () => this.enter(toTrajectory), s: () => this.enter(toGroup), "/": () => this.filters.search.focus(),
      x: () => this.pick(picking.current()), X: () => { picking.toggleAll(); this.draw(); },
      n: () => this.turn(1), p: () => this.turn(-1), ...curationKeys(() => picking.targets(), this.shell, after),
    };
  }

  controls() {
    const act = CURATION_KEYS.map(([key, label]) => button(label, key, () => this.keys[key]()));
    this.chosen = el("span", {});
    const props = { class: "curating", role: "group", "aria-label": "Curate the selected" };
    const curating = el("div", props, act, this.chosen);
    return el("div", { class: "controls" }, this.found, field("Order", this.sort), curating, this.pager);
  }

  table() {
    const heads = COLUMNS.map(([name, kind]) => el("th", { scope: "col", class: kind }, name || unseen("Select")));
    return el("table", { class: "rows" }, el("thead", {}, el("tr", {}, heads)), this.body);
  }

  take({ offset = "0", sort = "newest", ...filters }) {
    this.offset = Number(offset) || 0;
    this.sort.value = sort;
    this.filters.set(filters);
  }

  update(params) {
    this.take(params);
  }

  changed() {
    this.offset = 0;
    picking.at = 0;
    this.ask();
  }

  params() {
    const sort = this.sort.value === "newest" ? "" : this.sort.value;
    return { ...this.filters.values(), sort, offset: this.offset || "" };
  }

  ask() {
    adjust("trajectories", this.params());
    this.load().catch((error) => isCancelled(error) || this.shell.notice.failed(error));
  }

  refresh() {
    return this.load();
  }

  async load() {
    this.abort?.abort();
    this.abort = new AbortController();
    const params = this.params();
    const answer = await get("trajectories", { ...params, limit: PAGE }, this.abort.signal);
    lastParams = params;
    this.show(answer);
    requestAnimationFrame(() => performance.mark("rows-shown", { detail: params }));
  }

  show(answer) {
    const told = JSON.stringify(answer);
    if (told === this.told) return;
    const isFirst = !this.told;
    this.told = told;
    this.matched = answer.matched;
    picking.show(answer.rows);
    this.filters.offer(answer.facets);
    this.tell(answer);
    this.draw();
    if (isFirst && picking.at) this.body.rows[picking.at].scrollIntoView({ block: "center" });
  }

  tell({ total, matched, texts }) {
    const partial = this.filters.values().text && texts.indexed < texts.of
      ? ` Texts of ${count(texts.indexed)} of ${count(texts.of)} can be searched so far.` : "";
    fill(this.found, el("b", {}, count(matched)), ` of ${plural(total, "trajectory")}.${partial}`);
    const last = Math.min(this.offset + PAGE, matched);
    fill(this.pager, `${count(Math.min(this.offset + 1, matched))}–${count(last)}`,
      button("previous", "p", () => this.turn(-1), { disabled: this.offset === 0 }),
      button("next", "n", () => this.turn(1), { disabled: last >= matched }));
  }

  draw() {
    const hadFocus = this.body.contains(document.activeElement);
    const rows = picking.rows.map((summary, i) => row(summary, {
      isCurrent: i === picking.at, isChosen: picking.has(summary), toggle: () => this.pick(summary),
    }));
    fill(this.body, rows.length ? rows : nothing());
    this.chosen.textContent = picking.chosen.size ? `${picking.chosen.size} selected` : "the current row";
    if (hadFocus) this.body.rows[picking.at]?.focus({ preventScroll: true });
  }

  move(by) {
    const { body } = this;
    const before = body.rows[picking.at];
    if (!picking.move(by)) return;
    const row = body.rows[picking.at];
    before.classList.remove("current");
    before.tabIndex = -1;
    row.classList.add("current");
    row.tabIndex = 0;
    row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }

  turn(by) {
    const offset = this.offset + by * PAGE;
    if (offset < 0 || offset >= this.matched) return;
    this.offset = offset;
    picking.at = 0;
    this.ask();
  }

  pick(summary) {
    if (!summary) return;
    picking.toggle(summary);
    this.draw();
  }

  clicked(event) {
    const tr = event.target.closest("tr");
    if (!tr || event.target.closest("a, input")) return;
    this.move([...this.body.rows].indexOf(tr) - picking.at);
  }

  enter(address) {
    const current = picking.current();
    if (current) location.hash = address(current);
  }

  leave() {
    this.abort?.abort();
  }
}

function unseen(text) {
  return el("span", { class: "unseen" }, text);
}

function nothing() {
  const text = "No trajectory matches. Clear the filters, or wait: new ones appear automatically.";
  return el("tr", {}, el("td", { colspan: COLUMNS.length, class: "none" }, text));
}
