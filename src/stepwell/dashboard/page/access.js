// The key: from the address (#key=…, as `stepwell up --show-key` prints it) or typed in. It is stored for this tab only
// and removed from the address at once, so that no bookmark or link contains it.
//
// Or a person logs in at a provider, and the server keeps them in a cookie that this page cannot read. Meanwhile the tab
// remembers its view: the server leads back to the page alone.

const PLACE = "stepwell.key";
const VIEW = "stepwell.view";

export function takeFromAddress() {
  const found = /^#key=([^&]+)(.*)$/.exec(location.hash);
  if (!found) return;
  keep(decodeURIComponent(found[1]));
  history.replaceState(history.state, "", `#/${found[2].replace(/^&?\/?/, "")}`);
}

export function keep(key) {
  sessionStorage.setItem(PLACE, key);
}

export function hasKey() {
  return sessionStorage.getItem(PLACE) !== null;
}

export function headers() {
  const key = sessionStorage.getItem(PLACE);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function logIn(where) {
  sessionStorage.removeItem(PLACE);
  sessionStorage.setItem(VIEW, location.hash);
  location.assign(where);
}

/** The view from before the login, if there was one. */
export function takeUpView() {
  const view = sessionStorage.getItem(VIEW);
  sessionStorage.removeItem(VIEW);
  if (view?.startsWith("#") && !location.hash) history.replaceState(history.state, "", view);
}

export async function logOut() {
  await fetch("logout", { method: "POST" });
  location.reload();
}
