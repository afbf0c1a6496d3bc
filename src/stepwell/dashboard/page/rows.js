// The rows of the list, and small parts that other views show too.

import { el } from "./dom.js";
import { count, moment, reward, versions } from "./format.js";
import { toGroup, toTrajectory } from "./routes.js";

export const COLUMNS = [
  ["", "pick"], ["Trajectory"], ["Prompt"], ["Channel"], ["State"], ["Reward", "n"], ["Steps", "n"], ["Tokens", "n"],
  ["Version", "n"], ["Exactness"], ["Marks"], ["Opened", "n"],
];

export function row(summary, { isCurrent, isChosen, toggle }) {
  const label = `Select ${summary.trajectory_uid}`;
  const box = el("input", { type: "checkbox", tabindex: "-1", onchange: toggle, "aria-label": label });
  box.checked = isChosen;
  const cells = [
    [box, "pick"],
    [el("a", { href: toTrajectory(summary), tabindex: "-1" }, summary.trajectory_uid), "uid"],
    [el("a", { href: toGroup(summary), tabindex: "-1", title: "Its group, side by side" }, summary.prompt_uid), "uid"],
    [summary.source ? `${summary.channel} · ${summary.source}` : summary.channel],
    [state(summary)],
    [reward(summary.reward), "n"],
    [steps(summary), "n"],
    [count(summary.tokens), "n"],
    [versions(summary.oldest_version, summary.newest_version), "n"],
    [summary.exactness],
    [marks(summary.marks)],
    [moment(summary.started_at), "n"],
  ];
  const kind = [isCurrent && "current", isChosen && "chosen"].filter(Boolean).join(" ");
  return el("tr", { class: kind, tabindex: isCurrent ? "0" : "-1", "aria-selected": String(isChosen) },
    cells.map(([content, name]) => el("td", { class: name }, content)));
}

export function state({ state: name, cause, note }) {
  const told = cause ? `${name}: ${cause}` : name;
  return el("span", { class: "state", title: note || null }, el("i", { class: `dot state-${name}` }), told);
}

export function marks(words) {
  return words.map((word) => el("span", { class: "mark" }, word));
}

function steps({ steps: all, quarantined, untrainable }) {
  const odd = quarantined + untrainable;
  const told = `${quarantined} quarantined, ${untrainable} untrainable`;
  return odd ? el("span", { title: told }, `${all}`, el("small", {}, ` −${odd}`)) : String(all);
}
