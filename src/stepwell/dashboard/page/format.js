// Numbers and times as text. Pure.

const NOTHING = "–";

export function count(value) {
  return value === null || value === undefined ? NOTHING : Math.round(value).toLocaleString("en");
}

/** Three figures at most: 0.042, 7.5, 812, 12.3k, 4.1M. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e9) return `${figures(value / 1e9)}G`;
  if (size >= 1e6) return `${figures(value / 1e6)}M`;
  if (size >= 1e4) return `${figures(value / 1e3)}k`;
  return figures(value);
}

function figures(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(size >= 1 ? 3 : 2)));
}

export function reward(value) {
  return value === null || value === undefined ? NOTHING : String(Number(value.toFixed(4)));
}

export function signed(value) {
  if (value === null || value === undefined) return NOTHING;
  return (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(2);
}

export function bytes(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value >= 1 << 30) return `${figures(value / (1 << 30))} GiB`;
  if (value >= 1 << 20) return `${figures(value / (1 << 20))} MiB`;
  return value >= 1024 ? `${figures(value / 1024)} KiB` : `${value} B`;
}

/** A duration in seconds. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${figures(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${figures(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** A point in time, in seconds since 1970: the time, with the date if it is not today. */
export function moment(at) {
  if (!at) return NOTHING;
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString("en-GB");
  return when.toDateString() === new Date().toDateString() ? time : `${day(when)} ${time}`;
}

function day(when) {
  return [when.getFullYear(), when.getMonth() + 1, when.getDate()].map((n) => String(n).padStart(2, "0")).join("-");
}

export function versions(oldest, newest) {
  if (oldest === null || oldest === undefined) return NOTHING;
  return oldest === newest ? String(oldest) : `${oldest}–${newest}`;
}

export function plural(n, word) {
  const many = word.endsWith("y") ? `${word.slice(0, -1)}ies` : `${word}s`;
  return `${count(n)} ${n === 1 ? word : many}`;
}

/** The entries of a tally, the largest first, as "cause 3, other 1". */
export function tally(counts) {
  const parts = Object.entries(counts ?? {}).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  return parts.map(([name, n]) => `${name} ${count(n)}`).join(", ");
}
