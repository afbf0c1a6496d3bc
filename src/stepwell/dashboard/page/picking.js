// A cursor and a selection over changing rows. Pure. Both are stored by name, so they stay on their trajectories when
// the list is refreshed.

export function nameOf({ trajectory_uid, prompt_uid }) {
  return JSON.stringify([prompt_uid, trajectory_uid]);
}

export class Picking {
  rows = [];
  at = 0;
  chosen = new Map();

  show(rows) {
    const current = this.current();
    this.rows = rows;
    const found = current ? rows.findIndex((row) => nameOf(row) === nameOf(current)) : -1;
    this.at = found >= 0 ? found : Math.max(0, Math.min(this.at, rows.length - 1));
    for (const row of rows) if (this.has(row)) this.chosen.set(nameOf(row), row);
  }

  current() {
    return this.rows[this.at];
  }

  /** Returns whether the cursor moved. */
  move(by) {
    const to = this.at + by;
    if (to < 0 || to >= this.rows.length) return false;
    this.at = to;
    return true;
  }

  has(row) {
    return this.chosen.has(nameOf(row));
  }

  toggle(row) {
    if (this.has(row)) this.chosen.delete(nameOf(row));
    else this.chosen.set(nameOf(row), row);
  }

  /** Selects all shown rows, or none if all are selected. */
  toggleAll() {
    const all = this.rows.every((row) => this.has(row));
    if (all) this.chosen.clear();
    else for (const row of this.rows) this.chosen.set(nameOf(row), row);
  }

  clear() {
    this.chosen.clear();
  }

  /** The trajectories to curate: the selected ones, or the one under the cursor. */
  targets() {
    if (this.chosen.size) return [...this.chosen.values()];
    return this.current() ? [this.current()] : [];
  }
}
