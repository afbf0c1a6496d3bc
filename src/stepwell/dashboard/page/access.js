// The key: from the address (#key=…, as `stepwell up --show-key` prints it) or typed in. It is stored for this tab only
// and removed from the address at once, so that no bookmark or link contains it.

const PLACE = "stepwell.key";

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
