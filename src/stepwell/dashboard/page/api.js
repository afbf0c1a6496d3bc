// The dashboard's own HTTP calls. What goes wrong is a Refusal whose message is for the reader.

import { headers } from "./access.js";

const MOST = 500;

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Its answer is no longer wanted: a newer question was asked. */
export function isCancelled(error) {
  return error.name === "AbortError";
}

export function get(path, params = {}, signal = undefined) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept).toString();
  return call(`api/${path}${query && `?${query}`}`, { headers: headers(), signal });
}

/** Any number of trajectories, in calls of at most 500. Gives the outcomes of all. */
export async function curate(decision, trajectories) {
  const outcomes = {};
  for (let first = 0; first < trajectories.length; first += MOST) {
    const part = trajectories.slice(first, first + MOST);
    const body = JSON.stringify({ ...decision, trajectories: part.map(named) });
    const init = { method: "POST", body, headers: { ...headers(), "Content-Type": "application/json" } };
    Object.assign(outcomes, (await call("api/curate", init)).outcomes);
  }
  return outcomes;
}

function named({ trajectory_uid, prompt_uid }) {
  return { trajectory_uid, prompt_uid };
}

async function call(path, init) {
  const answer = await fetch(path, { ...init, cache: "no-store" }).catch(unreachable);
  const body = await answer.json().catch(answer.ok ? unreachable : () => null);
  if (answer.ok) return body;
  throw new Refusal(answer.status, body?.error?.message ?? `The dashboard answered ${answer.status}.`);
}

function unreachable(error) {
  if (isCancelled(error)) throw error;
  throw new Refusal(0, "The dashboard does not answer: see whether it is still running. It is asked again.");
}
