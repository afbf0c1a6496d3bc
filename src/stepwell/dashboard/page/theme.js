// Light or dark theme: the system's choice until a person changes it. The colours are in style/base.css.

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

/** The resolved value of a theme colour, for the canvas. */
export function colour(name) {
  const probe = document.createElement("i");
  probe.className = `colour-${name}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
