// Keyboard shortcuts. Keys in a field, keys with Ctrl, Alt or Meta, and keys while a dialog is open are not handled.

import { el } from "./dom.js";

export const EVERYWHERE = [
  ["?", "this list"],
  ["g o", "overview"],
  ["g t", "trajectories"],
  ["g n", "next batch"],
  ["g a", "audit trail"],
  ["/", "search"],
  ["Esc", "back, or leave a field"],
];

const GOES = { o: "overview", t: "trajectories", n: "preview", a: "audit" };

export class Shortcuts {
  /** `keys` returns the present view's keys: {key: act}; `go` opens a view; `leave` goes back; `help` lists keys. */
  constructor({ keys, go, leave, help }) {
    Object.assign(this, { keys, go, leave, help });
    this.isGoing = false;
    document.addEventListener("keydown", (event) => this.pressed(event));
  }

  pressed(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = this.meaning(event);
    if (!act) return;
    event.preventDefault();
    act();
  }

  meaning(event) {
    if (this.isGoing) return this.destination(event.key);
    if (event.key === "g") return () => { this.isGoing = true; };
    if (event.key === "?") return this.help;
    if (event.key === "Escape") return this.leave;
    if (event.key === "Enter" && event.target.closest("a, button, summary")) return undefined;
    const keys = this.keys();
    return Object.hasOwn(keys, event.key) ? keys[event.key] : undefined;
  }

  destination(key) {
    if (key === "Shift") return undefined;
    this.isGoing = false;
    return Object.hasOwn(GOES, key) ? () => this.go(GOES[key]) : undefined;
  }
}

function isTyping(node) {
  return node.matches("input:not([type=checkbox]), select, textarea");
}

/** A dialog that lists keys: those of the view, then those that work everywhere. */
export function showKeys(own) {
  const rows = [...own, ...EVERYWHERE].map(([keys, what]) => [
    el("dt", {}, keys.split(" ").map((key) => el("kbd", {}, key))),
    el("dd", {}, what),
  ]);
  const close = el("button", { type: "submit" }, "Close");
  const form = el("form", { method: "dialog" }, el("h2", {}, "Keys"), el("dl", { class: "keys" }, rows), close);
  const dialog = el("dialog", { "aria-label": "Keys", onclose: () => dialog.remove() }, form);
  document.body.append(dialog);
  dialog.showModal();
}
