// The filter bar above the list. Each filter is one control; the address holds the values that are set.

import { button, el, field, fill } from "./dom.js";
import { count } from "./format.js";

const TYPING = 200;
const SELECTS = [
  ["channel", "Channel", "channels"], ["state", "State", "states"], ["cause", "Cause", "causes"],
  ["exactness", "Exactness", "exactness"], ["mark", "Mark", "marks"], ["source", "Source", "sources"],
];
const TEXTS = [["uid", "Trajectory"], ["prompt_uid", "Prompt"]];
const RANGES = [["reward", "Reward", "any"], ["version", "Version", "1"]];

export const FILTERS = [
  "text", ...SELECTS.map(([name]) => name), ...TEXTS.map(([name]) => name),
  ...RANGES.flatMap(([name]) => [`${name}_min`, `${name}_max`]),
];

export class Filters {
  /** `changed` is called after a person changed a filter; `values()` then has the new values. */
  constructor(changed) {
    this.changed = changed;
    this.controls = {};
    this.search = this.input("text", { type: "search", placeholder: "text of the conversation" });
    const selects = SELECTS.map(([name, label]) => field(label, this.select(name)));
    const texts = TEXTS.map(([name, label]) => field(label, this.input(name, { type: "search" })));
    const ranges = RANGES.map(([name, label, step]) => this.range(name, label, step));
    const clear = button("Clear", null, () => { this.set({}); this.changed(); }, { class: "quiet" });
    this.node = el("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      field("Search", this.search), selects, texts, ranges, clear);
  }

  select(name) {
    const node = el("select", { name, onchange: () => this.changed() }, el("option", { value: "" }, "any"));
    return (this.controls[name] = node);
  }

  input(name, props) {
    const later = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.changed(), TYPING);
    };
    const plain = { name, autocomplete: "off", spellcheck: "false", oninput: later };
    return (this.controls[name] = el("input", { ...plain, ...props }));
  }

  range(name, label, step) {
    const ends = [["min", "from"], ["max", "to"]].map(([end, word]) =>
      this.input(`${name}_${end}`, { type: "number", step, placeholder: word, "aria-label": `${label} ${word}` }));
    return el("fieldset", { class: "field range" }, el("legend", {}, label), ends);
  }

  values() {
    const found = Object.entries(this.controls).map(([name, node]) => [name, node.value]);
    return Object.fromEntries(found.filter(([, value]) => value !== ""));
  }

  set(values) {
    for (const [name, node] of Object.entries(this.controls)) {
      const value = values[name] ?? "";
      if (node.localName === "select") ensure(node, value);
      if (node.value !== value) node.value = value;
    }
  }

  /** The values to choose from, with their counts. */
  offer(facets) {
    for (const [name, , facet] of SELECTS) {
      const node = this.controls[name];
      if (node === document.activeElement) continue;
      const chosen = node.value;
      const found = Object.entries(facets[facet] ?? {}).filter(([value]) => value !== "");
      found.sort(([a], [b]) => (a < b ? -1 : 1));
      fill(node, option("", "any"), found.map(([value, n]) => option(value, `${value} (${count(n)})`)));
      ensure(node, chosen);
      node.value = chosen;
    }
  }
}

function option(value, text) {
  return el("option", { value }, text);
}

function ensure(select, value) {
  if (![...select.options].some((o) => o.value === value)) select.append(option(value, value));
}
