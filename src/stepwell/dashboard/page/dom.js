// Elements from plain values. Text stays text: nothing in the page parses HTML, and only routes.js makes addresses from
// data. So the output of a model is shown and never run.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) set(node, name, value);
  node.append(...present(children));
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

function present(children) {
  return children.flat(2).filter((child) => child !== null && child !== undefined && child !== false);
}

function set(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (name === "data") Object.assign(node.dataset, value);
  else if (name === "value") node.value = value;
  else node.setAttribute(name, value === true ? "" : String(value));
}

export function button(label, key, act, props = {}) {
  return el("button", { type: "button", onclick: act, ...props }, label, key && el("kbd", {}, key));
}

export function field(label, control) {
  return el("label", { class: "field" }, el("span", {}, label), control);
}

/** A row of buttons, one of which is pressed: [[value, label], …]. */
export function choice(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) => {
    const press = () => { show(value); choose(value); };
    return el("button", { type: "button", onclick: press, data: { value } }, text);
  });
  const show = (value) => {
    for (const b of buttons) b.setAttribute("aria-pressed", String(b.dataset.value === String(value)));
  };
  show(chosen);
  const node = el("div", { class: "choice", role: "group", "aria-label": label }, buttons);
  return { node, show };
}
