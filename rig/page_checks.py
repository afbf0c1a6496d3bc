"""What must hold of any page: text that can be read, controls that have names. Asked of the page itself."""

from playwright.sync_api import Page

READABLE = 4.5
"""WCAG's contrast for text of ordinary size."""

FAINT = """
(least) => {
  const numbers = (css) => {
    const [r, g, b, a = 1] = css.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const background = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const { rgb, a } = numbers(getComputedStyle(at).backgroundColor);
      if (a === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (node) => {
    const [a, b] = [light(numbers(getComputedStyle(node).color).rgb), light(background(node))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const hasText = (node) => [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  return [...document.querySelectorAll("body *")]
    .filter((node) => hasText(node) && node.checkVisibility() && !node.disabled && node.localName !== "option")
    .filter((node) => contrast(node) < least)
    .map((node) => [contrast(node).toFixed(1), node.localName, node.className, node.innerText].join(" ").slice(0, 80));
}
"""
UNNAMED = """
() => [...document.querySelectorAll("button, input, select, a[href], [tabindex='0']")]
  .filter((node) => !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length))
  .map((node) => node.outerHTML.slice(0, 120))
"""


def faint_texts(page: Page) -> list[str]:
    """Texts whose contrast with what is behind them is too low to be read by everyone."""
    found: list[str] = page.evaluate(FAINT, READABLE)
    return found


def unnamed_controls(page: Page) -> list[str]:
    """What can be used but has no name to be called by."""
    found: list[str] = page.evaluate(UNNAMED)
    return found
