// Light or dark: the system's choice until a person makes another. The colours themselves are in style/base.css.

const PLACE = "stepwell.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

export function start(switching, changed) {
  const show = (name) => {
    document.documentElement.dataset.theme = name;
    switching.textContent = `Theme: ${name}`;
  };
  show(localStorage.getItem(PLACE) ?? "system");
  switching.addEventListener("click", () => {
    const name = NEXT[document.documentElement.dataset.theme];
    localStorage.setItem(PLACE, name);
    show(name);
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

/** A colour of the theme as the canvas needs it: resolved. */
export function colour(name) {
  const probe = document.createElement("i");
  probe.className = `colour-${name}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
