// The page's HTTP calls. A failure is a Refusal with a message for the reader.

import { headers } from "./access.js";

const MOST = 500;

export class Refusal extends Error {
  /** `login` is where a person can log in, if the server lets people do so. */
  constructor(status, message, login = undefined) {
    super(message);
    this.status = status;
    this.login = login;
  }
}

/** The request was cancelled because a newer one replaces it. */
export function isCancelled(error) {
  return error.name === "AbortError";
}

export function get(path, params = {}, signal = undefined) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept).toString();
  return call(`api/${path}${query && `?${query}`}`, { headers: headers(), signal });
}

/** Any number of trajectories, in calls of at most 500. Returns all outcomes. */
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
  throw new Refusal(answer.status, body?.error?.message ?? `The dashboard answered ${answer.status}.`, body?.error?.login);
}

function unreachable(error) {
  if (isCancelled(error)) throw error;
  throw new Refusal(0, "The dashboard does not answer; check that it is still running. The page tries again.");
}
