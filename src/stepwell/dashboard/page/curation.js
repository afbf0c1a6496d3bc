// Curation of trajectories: a dialog that asks who and why, and a line with the outcome.

import { curate, get } from "./api.js";
import { el, field } from "./dom.js";
import { plural } from "./format.js";

const WHO = "stepwell.who";
const ACTIONS = {
  mark: { title: "Mark", says: "A short word that is stored with the trajectory. Trainers and exports can read it." },
  unmark: { title: "Unmark", says: "" },
  reject: { title: "Reject", says: "No later batch contains it. Training that already used it cannot be undone." },
  relabel: { title: "Relabel", says: "Later batches have this reward instead of the present one." },
};
const WORDS = {
  done: "done", unchanged: "unchanged", unknown: "no longer known to the pool",
  late: "too late: already trained or dropped",
};

export const CURATION_KEYS = [["m", "mark"], ["u", "unmark"], ["r", "reject"], ["l", "relabel"]];

/** Keys that curate the trajectories of `targets()`; `after` is called after a decision. */
export function curationKeys(targets, shell, after) {
  const ask = (action) => async () => {
    if (!targets().length) return;
    try {
      askFor(action, targets(), await get("me"), shell, after);
    } catch (error) {
      shell.notice.failed(error);
    }
  };
  return { m: ask("mark"), u: ask("unmark"), r: ask("reject"), l: ask("relabel") };
}

function askFor(action, trajectories, me, shell, after) {
  const { title, says } = ACTIONS[action];
  const own = ownField(action, trajectories);
  const known = localStorage.getItem(WHO) ?? "";
  const by = el("input", { required: !me.id, maxlength: 80, autocomplete: "name", value: known });
  const why = el("input", { maxlength: 500, autocomplete: "off" });
  const failure = el("p", { class: "failure", role: "alert" });
  const form = el("form", {},
    el("h2", {}, `${title} ${plural(trajectories.length, "trajectory")}`),
    says && el("p", {}, says), own && field(own.label, own.input), me.id ? el("p", {}, `As ${me.id}`) : field("Who", by), field("Why", why), failure,
    buttons(title, () => dialog.close()));
  const dialog = el("dialog", { "aria-label": title, onclose: () => dialog.remove() }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!me.id) localStorage.setItem(WHO, by.value);
    try {
      const outcomes = await curate({ action, by: me.id ? "" : by.value, why: why.value, ...own?.value() }, trajectories);
      dialog.close();
      shell.notice.done(`${title}: ${summed(outcomes)}`);
      after();
    } catch (error) {
      failure.textContent = error.message;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  (own?.input ?? (me.id || by.value ? why : by)).focus();
}

function buttons(title, close) {
  const submit = el("button", { type: "submit", class: "main" }, title);
  return el("p", { class: "buttons" }, submit, el("button", { type: "button", onclick: close }, "Cancel"));
}

function ownField(action, trajectories) {
  if (action === "reject") return null;
  if (action === "relabel") {
    const input = el("input", { type: "number", step: "any", required: true });
    return { label: "Reward", input, value: () => ({ reward: Number(input.value) }) };
  }
  const first = action === "unmark" ? trajectories.flatMap((t) => t.marks)[0] ?? "" : "";
  const input = el("input", { required: true, maxlength: 40, autocomplete: "off", value: first });
  return { label: "Mark", input, value: () => ({ mark: input.value.trim() }) };
}

function summed(outcomes) {
  const counts = new Map();
  for (const outcome of Object.values(outcomes)) counts.set(outcome, (counts.get(outcome) ?? 0) + 1);
  return [...counts].map(([outcome, n]) => `${n} ${WORDS[outcome] ?? outcome}`).join(", ");
}
