// The line at the top: a failure and what to do, or the last action.

import { button, el, fill } from "./dom.js";
import { hasKey, keep, logIn } from "./access.js";

const LASTS = 6000;

export class Notice {
  constructor(node, again) {
    this.node = node;
    this.again = again;
    this.kind = "";
  }

  done(text) {
    this.show("done", text);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.kind === "done" && this.clear(), LASTS);
  }

  failed(error) {
    if (error.status === 401) this.askForKey(error.login);
    else this.show("failed", error.message);
  }

  /** The last refresh succeeded. */
  well() {
    if (this.kind !== "done") this.clear();
  }

  clear() {
    this.kind = this.text = "";
    fill(this.node).className = "notice";
  }

  show(kind, text) {
    if (this.kind === kind && this.text === text) return;
    this.kind = kind;
    this.text = text;
    fill(this.node, el("span", {}, text)).className = `notice ${kind}`;
  }

  askForKey(login) {
    if (this.kind === "key") return;
    this.kind = "key";
    const input = el("input", { type: "password", "aria-label": "Key", autocomplete: "off", required: true });
    const use = (event) => {
      event.preventDefault();
      keep(input.value);
      this.clear();
      this.again();
    };
    const form = el("form", { onsubmit: use }, input, el("button", { type: "submit" }, "Use this key"));
    const what = hasKey() ? "That key is unknown, expired or revoked." : "This needs a key: one of `stepwell keys create --role viewer` or curator, or a control key; `stepwell up` keeps its own in .stepwell/key.";
    const toLogIn = login && button("Log in", "", () => logIn(login), { class: "main" });
    fill(this.node, el("span", {}, what), toLogIn, form).className = "notice failed";
    (toLogIn || input).focus();
  }
}
