// What the two canvases over time have in common: their size in device pixels, the axis, panning and zooming by pointer, wheel and
// fingers, and drawing not more than once a frame.

import { seconds } from "./format";
import { colour, refresh } from "./colours";
import type { View } from "./view";

export class Chart {
  readonly context: CanvasRenderingContext2D;
  width = 0;
  height = 0;
  private pending = 0;
  private stops: (() => void)[] = [];
  private pointers = new Map<number, { x: number; y: number }>();
  private moved = 0;

  constructor(
    readonly canvas: HTMLCanvasElement,
    readonly view: View,
    readonly gutter: () => number,
    private draw: () => void,
    private hover: (x: number, y: number, event: PointerEvent | null) => void,
    private click: (x: number, y: number) => void,
  ) {
    this.context = canvas.getContext("2d")!;
    const sizes = new ResizeObserver(() => this.resize());
    sizes.observe(canvas);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    const recolour = () => { refresh(); this.redraw(); };
    theme.addEventListener("change", recolour);
    addEventListener("themechange", recolour);
    // A printer takes what is drawn now.
    const print = matchMedia("print");
    const onPaper = () => { refresh(); this.resize(); this.paint(); };
    print.addEventListener("change", onPaper);
    this.stops.push(
      () => print.removeEventListener("change", onPaper),
      () => sizes.disconnect(),
      () => theme.removeEventListener("change", recolour),
      () => removeEventListener("themechange", recolour),
      view.subscribe(() => this.redraw()),
    );
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.hover(-1, -1, null));
    canvas.addEventListener("dblclick", (event) => this.view.zoom(event.shiftKey ? 1 / 4 : 4, this.time(event.offsetX)));
    this.resize();
  }

  stop() {
    cancelAnimationFrame(this.pending);
    this.stops.forEach((stop) => stop());
  }

  redraw() {
    if (this.pending === 0) {
      this.pending = requestAnimationFrame(() => {
        this.pending = 0;
        this.paint();
      });
    }
  }

  private paint() {
    this.context.clearRect(0, 0, this.width, this.height);
    this.draw();
  }

  resize() {
    const ratio = devicePixelRatio || 1, box = this.canvas.getBoundingClientRect();
    [this.width, this.height] = [box.width, box.height];
    const [width, height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) [this.canvas.width, this.canvas.height] = [width, height];
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.redraw();
  }

  get scale() {
    return Math.max(1, this.width - this.gutter()) / this.view.span;
  }

  x(time: number) {
    return this.gutter() + (time - this.view.from) * this.scale;
  }

  time(x: number) {
    return this.view.from + (x - this.gutter()) / this.scale;
  }

  /** Ticks at round numbers of seconds, with their lines down to the bottom. */
  axis(height: number) {
    const { context, view } = this, rough = view.span / Math.max(2, (this.width - this.gutter()) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = power * ([1, 2, 5, 10].find((n) => n * power >= rough) ?? 10);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let k = Math.ceil(view.from / tick); k * tick <= view.to; k++) {
      const x = Math.round(this.x(k * tick)) + 0.5;
      context.fillStyle = colour("grid");
      context.fillRect(x, height, 1, this.height - height);
      context.fillStyle = colour("muted");
      const label = k === 0 ? "0 s" : precise(k * tick, tick);
      if (x + context.measureText(label).width + 6 < this.width) context.fillText(label, x + 4, height / 2);
    }
  }

  private wheel(event: WheelEvent) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.view.zoom(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.06 : 0.004)), this.time(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.pan((event.deltaX || event.deltaY) / this.scale);
    }
  }

  private down(event: PointerEvent) {
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.moved = 0;
  }

  private move(event: PointerEvent) {
    const known = this.pointers.get(event.pointerId);
    if (!known) {
      this.hover(event.offsetX, event.offsetY, event);
      return;
    }
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    const dx = event.offsetX - known.x;
    this.moved += Math.abs(dx) + Math.abs(event.offsetY - known.y);
    if (other) {
      const before = Math.max(8, Math.abs(known.x - other.x)), after = Math.max(8, Math.abs(event.offsetX - other.x));
      this.view.zoom(after / before, this.time((event.offsetX + other.x) / 2));
    } else if (this.moved > 4) {
      this.canvas.setPointerCapture(event.pointerId);
      this.hover(-1, -1, null);
      this.view.pan(-dx / this.scale);
    }
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
  }

  private up(event: PointerEvent) {
    if (this.pointers.delete(event.pointerId) && this.moved <= 4) this.click(event.offsetX, event.offsetY);
  }
}

/** A time on the axis, with as many digits as tell ticks apart. */
function precise(time: number, tick: number): string {
  const [unit, name] = time < 1e-3 ? [1e-6, "us"] : time < 1 ? [1e-3, "ms"] : [1, "s"];
  const decimals = Math.max(0, -Math.floor(Math.log10(tick / unit) + 1e-9));
  return decimals > 9 ? seconds(time) : `${(time / unit).toFixed(decimals)} ${name}`;
}

/** Draws stretches of one track. What is below a pixel is put together: each colour takes as much of the pixel's height as its
 * stretches take of its time, and the rest is left as it is. */
export class Track {
  private pixel = -1;
  private parts = new Map<string, number>();

  constructor(private context: CanvasRenderingContext2D, private y: number, private height: number, private left: number, private right: number) {}

  /** Returns whether the stretch is wide enough to be drawn by itself. */
  add(from: number, to: number, fill: string): boolean {
    if (to - from >= 1.5) {
      this.flush();
      const [x, end] = [Math.max(this.left, from), Math.min(this.right, to)];
      if (end <= x) return false;
      this.context.fillStyle = fill;
      // A line of background between neighbours tells them apart.
      this.context.fillRect(x, this.y, Math.max(0.75, end - x - (to - from > 4 && to <= this.right ? 1 : 0)), this.height);
      return true;
    }
    for (let pixel = Math.max(this.left, Math.floor(from)); pixel <= Math.min(this.right, Math.floor(to)); pixel++) {
      if (pixel !== this.pixel) this.flush();
      this.pixel = pixel;
      const part = Math.min(to, pixel + 1) - Math.max(from, pixel);
      if (part > 0) this.parts.set(fill, (this.parts.get(fill) ?? 0) + part);
    }
    return false;
  }

  flush() {
    let y = this.y + this.height;
    for (const [fill, part] of [...this.parts].sort((a, b) => (a[0] < b[0] ? -1 : 1))) {
      const height = Math.min(1, part) * this.height;
      y -= height;
      this.context.fillStyle = fill;
      this.context.fillRect(this.pixel, y, 1, height);
    }
    this.parts.clear();
    this.pixel = -1;
  }
}
