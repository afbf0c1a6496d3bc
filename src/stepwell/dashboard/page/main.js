// The shell: the present view, its refreshing, and the line at the top.
//
// A view is the result of its module's `open(shell, params)`: {node, every, refresh(status), keys, legend, title} and,
// optionally, update(params), leave() and redraw(). Invariants: at most one refresh runs at a time, and none while the
// page is hidden. The response to an old request never replaces a newer one.

import * as audit from "./audit.js";
import * as group from "./group.js";
import * as overview from "./overview.js";
import * as preview from "./preview.js";
import * as trajectories from "./trajectories.js";
import * as trajectory from "./trajectory.js";
import { Refusal, get, isCancelled } from "./api.js";
import { logOut, takeFromAddress, takeUpView } from "./access.js";
import { fill } from "./dom.js";
import { count, moment } from "./format.js";
import { Notice } from "./notice.js";
import { depth, go, here } from "./routes.js";
import { Shortcuts, showKeys } from "./shortcuts.js";
import * as theme from "./theme.js";

/** Views without a link in the bar at the top, and the view whose link is marked instead. */
const WITHIN = { trajectory: "trajectories", group: "trajectories" };
const VIEWS = { overview, trajectories, trajectory, group, preview, audit };

class Shell {
  constructor() {
    this.notice = new Notice(document.getElementById("notice"), () => this.tick());
    this.main = document.getElementById("main");
    this.view = null;
    this.isBusy = false;
    this.heardAt = null;
    this.depth = -1;
  }

  start() {
    takeFromAddress();
    takeUpView();
    theme.start(document.getElementById("theme"), () => this.view.redraw?.());
    const help = () => showKeys(this.view.legend);
    document.getElementById("help").addEventListener("click", help);
    this.logout = document.getElementById("logout");
    this.logout.addEventListener("click", logOut);
    new Shortcuts({ keys: () => this.view.keys, go, leave: () => this.back(), help });
    addEventListener("hashchange", () => this.route());
    document.addEventListener("visibilitychange", () => this.tick());
    this.route();
  }

  route() {
    takeFromAddress();
    this.depth = depth(this.depth);
    const { view, params } = here();
    const name = Object.hasOwn(VIEWS, view) ? view : "overview";
    if (this.name === name && this.view.update) this.view.update(params);
    else this.open(name, params);
    this.tick();
  }

  open(name, params) {
    this.view?.leave?.();
    this.name = name;
    this.view = VIEWS[name].open(this, params);
    document.title = `${this.view.title} · Stepwell`;
    for (const a of document.querySelectorAll("#nav a")) {
      if (a.dataset.view === (WITHIN[name] ?? name)) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    }
    fill(this.main, this.view.node);
    this.main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }

  back() {
    if (this.depth > 0) history.back();
    else go("overview");
  }

  async tick() {
    clearTimeout(this.timer);
    if (document.visibilityState !== "visible") return;
    if (this.isBusy) {
      this.isAsked = true;
      return;
    }
    this.isBusy = true;
    await this.refresh();
    this.isBusy = false;
    this.timer = setTimeout(() => this.tick(), this.isAsked ? 0 : this.view.every);
    this.isAsked = false;
  }

  async refresh() {
    const asked = get("status");
    const [status, shown] = await Promise.allSettled([asked, this.view.refresh(asked)]);
    if (status.value) fill(document.getElementById("pool"), about(status.value));
    if (status.reason?.status === 401) this.me = null;
    else if (status.value && !this.me) await this.showPerson();
    const trouble = status.reason ?? this.poolTrouble(status.value) ?? shown.reason;
    if (!trouble) this.notice.well();
    else if (!isCancelled(trouble)) this.notice.failed(trouble);
  }

  /** Only who is logged in can log out. */
  async showPerson() {
    this.me = await get("me").catch(() => null);
    const person = /^oidc (.*)$/.exec(this.me?.id ?? "");
    this.logout.hidden = !person;
    if (person) fill(this.logout, `Log out ${person[1]}`);
  }

  poolTrouble(status) {
    if (!status.pool_error) {
      this.heardAt = status.now;
      return undefined;
    }
    const since = this.heardAt ? ` The page shows the state of ${moment(this.heardAt)}.` : "";
    const what = status.pool ? "Part of the pool is away" : "The pool cannot be reached";
    return new Refusal(503, `${what}: ${status.pool_error}.${since} The page tries again.`);
  }
}

function about({ pool, index, version }) {
  if (!pool?.name) return `stepwell ${version}`;
  const behind = index.behind ? ", catching up" : "";
  return `${pool.name} · policy version ${pool.policy_version} · ${count(index.trajectories)} trajectories${behind}`;
}

new Shell().start();
