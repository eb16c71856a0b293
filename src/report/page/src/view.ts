// The stretch of time that is looked at, which the timeline and the memory below it share.

export class View {
  from = 0;
  to: number;
  private listeners = new Set<() => void>();

  constructor(readonly end: number) {
    this.to = end;
  }

  get span() {
    return this.to - this.from;
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }

  set(from: number, to: number) {
    // Below a nanosecond nothing is drawn that means anything.
    const span = Math.min(this.end, Math.max(to - from, Math.min(1e-9, this.end)));
    this.from = Math.min(Math.max(0, from), this.end - span);
    this.to = this.from + span;
    this.listeners.forEach((listener) => listener());
  }

  zoom(factor: number, at = (this.from + this.to) / 2) {
    this.set(at - (at - this.from) / factor, at + (this.to - at) / factor);
  }

  pan(seconds: number) {
    this.set(this.from + seconds, this.to + seconds);
  }

  all() {
    this.set(0, this.end);
  }

  /** Moves as little as shows a stretch with some of what is around it. */
  show(from: number, to: number) {
    if (to - from > this.span) this.set(from - (to - from) * 0.1, to + (to - from) * 0.1);
    else if (from < this.from) this.pan(from - this.from - this.span * 0.1);
    else if (to > this.to) this.pan(to - this.to + this.span * 0.1);
  }
}
