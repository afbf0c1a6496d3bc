// Time charts and histograms, drawn by uPlot. uPlot gets numbers and colours, never a name: names are text in a legend
// of our own, because the name of a cause can come from an agent.

import { el, fill } from "./dom.js";
import { short } from "./format.js";
import { colour } from "./theme.js";

const HEIGHT = 132;
const SYNC = "time";

/** A chart with its frame, a legend that follows the cursor, and a size that follows the page. */
export class Chart {
  /** `lines` is [{label, colour, kind: "line" | "area" | "dash" | "bars" | "edge"}, …]. */
  constructor(title, { unit = "", format = short, isTime = true, axis = "" } = {}) {
    Object.assign(this, { unit, format, isTime, axis });
    this.legend = el("p", { class: "legend" });
    this.canvas = el("div", { class: "canvas" });
    const named = unit ? `${title}, ${unit}` : title;
    const head = el("h3", {}, title, unit && el("small", {}, unit));
    this.node = el("figure", { class: "chart", "aria-label": named }, head, this.legend, this.canvas);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
    this.lines = [];
  }

  /** `shown` has the values for the legend, if they differ from the drawn ones (stacked areas). */
  draw(lines, data, { bands = [], shown = data } = {}) {
    this.shown = shown;
    this.bands = bands;
    const isSame = this.plot && labels(lines) === labels(this.lines);
    this.lines = lines;
    this.data = data;
    if (isSame) this.plot.setData(data);
    else this.build();
    this.canvas.classList.toggle("empty", !data.slice(1).some((values) => latest(values) !== null));
    this.tell(this.plot?.cursor.idx ?? null);
  }

  build() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.canvas.clientWidth;
    if (!width || !this.data) return;
    this.plot = new uPlot(this.options(width), this.data, this.canvas);
  }

  options(width) {
    const [ink, grid] = [colour("dim"), colour("grid")];
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 5 }, ...(this.isTime ? { sync: { key: SYNC } } : {}) },
      scales: { x: { time: this.isTime, ...(this.isTime ? {} : { range: aroundBars }) }, y: { range: fromZero } },
      axes: [{ ...axis, size: 24, space: 64, ...(this.isTime ? { values: clocks } : { incrs: WHOLE }) },
        { ...axis, size: 42, space: 26, values: (_, ticks) => ticks.map((v) => short(v)) }],
      series: [{}, ...this.lines.map(line)],
      bands: this.bands.map((band) => ({ series: band, fill: colour("band") })),
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
    };
  }

  /** The legend, with the values under the cursor, or the latest. */
  tell(at) {
    const parts = this.lines.filter((l) => l.label).map((l) => {
      const values = this.shown[this.lines.indexOf(l) + 1];
      const value = at === null ? (this.isTime ? latest(values) : null) : values[at];
      const said = value === null || value === undefined ? "" : this.format(value);
      return el("span", {}, el("i", { class: `swatch colour-${l.colour} ${l.kind}` }), l.label, el("b", {}, said));
    });
    const where = !this.isTime && at !== null ? el("span", {}, `${this.data[0][at]} ${this.axis}`) : null;
    fill(this.legend, where, parts);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (!this.plot) this.build();
    else if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  leave() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

function line({ colour: name, kind }) {
  const stroke = colour(name);
  const plain = { stroke, width: 1.5, points: { show: false }, spanGaps: true };
  if (kind === "bars") return { ...plain, fill: stroke, width: 0, paths: uPlot.paths.bars({ size: [0.7, 40] }) };
  if (kind === "area") return { ...plain, width: 1, fill: stroke };
  if (kind === "edge") return { ...plain, width: 0 };
  return kind === "dash" ? { ...plain, width: 1, dash: [3, 3] } : plain;
}

function labels(lines) {
  return JSON.stringify(lines.map((l) => l.label));
}

function latest(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

function fromZero(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const bottom = Math.min(0, low);
  return [bottom < 0 ? bottom * 1.08 : 0, high <= 0 && bottom === 0 ? 1 : Math.max(high, 0) * 1.08];
}

function aroundBars(_, low, high) {
  return low === null ? [-0.5, 4.5] : [low - 0.5, Math.max(high, low + 4) + 0.5];
}

function clocks(_, ticks) {
  return ticks.map((at) => new Date(at * 1000).toTimeString().slice(0, 5));
}
