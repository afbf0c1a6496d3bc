// The view and its parameters are in the fragment of the address, so that the back button and links work:
// #/trajectories?state=dropped&sort=-reward. Only this file makes addresses.

const HOME = "overview";

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || HOME, params: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(view, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept).toString();
  return `#/${view}${query && `?${query}`}`;
}

export function go(view, params) {
  location.hash = link(view, params);
}

/** Changes the parameters of the view without a new entry in the browser's history. */
export function adjust(view, params) {
  history.replaceState(history.state, "", link(view, params));
}

export function toTrajectory({ trajectory_uid, prompt_uid }) {
  return link("trajectory", { trajectory_uid, prompt_uid });
}

export function toGroup({ prompt_uid, group, shard }) {
  return link("group", { prompt_uid, group, shard });
}

/** How many views were opened before this one in this tab. Each gets its number when it is first shown. */
export function depth(before) {
  if (history.state?.depth === undefined) history.replaceState({ depth: before + 1 }, "");
  return history.state.depth;
}
