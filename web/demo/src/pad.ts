/** The drawing area: strokes by mouse, pen, finger or keyboard. */

type Point = { x: number; y: number };
export type Stroke = Point[];

/** Width and height of the coordinates, whatever the size on the screen. */
const EXTENT = 280;
// As thick as the strokes of the digits that the base model knows.
const PEN = 24;
// Width and height of the bitmap that is preprocessed.
const BITMAP = 112;
const STEP = 6;

/** A square canvas that collects strokes. */
export class Pad {
  strokes: Stroke[] = [];
  /** Shown while nothing is drawn. */
  hint = "";
  /** Called after each change, and while a stroke is drawn. */
  onChange: () => void = () => {};
  readonly #canvas: HTMLCanvasElement;
  readonly #announce: (text: string) => void;
  #pen: Point = { x: EXTENT / 2, y: EXTENT / 4 };
  #down = false;
  #keyboard = false;
  // Number of the pointer that draws; a second finger draws nothing.
  #pointer: number | null = null;

  constructor(canvas: HTMLCanvasElement, announce: (text: string) => void) {
    this.#canvas = canvas;
    this.#announce = announce;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || this.#pointer !== null) return;
      event.preventDefault();
      canvas.focus({ preventScroll: true });
      this.#pointer = event.pointerId;
      try {
        // So that a stroke goes on beyond the border of the canvas, and ends there.
        canvas.setPointerCapture(event.pointerId);
      } catch {
        // Pointers that scripts make up cannot be captured.
      }
      this.#keyboard = this.#down = false;
      this.strokes.push([this.#at(event)]);
      this.#changed();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerId !== this.#pointer) return;
      // Browsers join the moves between two frames; all of them make a smoother line.
      const moves = event.getCoalescedEvents?.() ?? [];
      this.strokes.at(-1)?.push(...(moves.length ? moves : [event]).map((move) => this.#at(move)));
      this.#changed();
    });
    for (const name of ["pointerup", "pointercancel"] as const) {
      canvas.addEventListener(name, (event) => {
        if (event.pointerId !== this.#pointer) return;
        this.#pointer = null;
        this.#changed();
      });
    }
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => {
      this.#lift();
      this.#keyboard = false;
      this.#draw();
    });
    new ResizeObserver(() => this.#draw()).observe(canvas);
    for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"])
      matchMedia(query).addEventListener("change", () => this.#draw());
  }

  /** True while a stroke is drawn. */
  get drawing(): boolean {
    return this.#down || this.#pointer !== null;
  }

  /** Replaces the strokes. */
  set(strokes: Stroke[]): void {
    this.strokes = strokes;
    this.#down = false;
    this.#changed();
  }

  /** Returns the ink as a bitmap of `size` x `size` pixels, 0 to 1. */
  ink(): { ink: Float32Array; size: number } {
    const canvas = new OffscreenCanvas(BITMAP, BITMAP);
    const context = canvas.getContext("2d", { willReadFrequently: true })!;
    context.scale(BITMAP / EXTENT, BITMAP / EXTENT);
    trace(context, this.strokes, "#000");
    const { data } = context.getImageData(0, 0, BITMAP, BITMAP);
    return { ink: Float32Array.from({ length: BITMAP * BITMAP }, (_, i) => data[4 * i + 3]! / 255), size: BITMAP };
  }

  #at(event: PointerEvent): Point {
    const box = this.#canvas.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * EXTENT,
      y: ((event.clientY - box.top) / box.height) * EXTENT,
    };
  }

  #key(event: KeyboardEvent): void {
    const moves: Record<string, [number, number]> = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
    };
    const move = moves[event.key];
    if (move) {
      const step = event.shiftKey ? 3 * STEP : STEP;
      const inside = (value: number): number => Math.min(EXTENT, Math.max(0, value));
      this.#pen = { x: inside(this.#pen.x + move[0] * step), y: inside(this.#pen.y + move[1] * step) };
      if (this.#down) this.strokes.at(-1)!.push({ ...this.#pen });
    } else if (event.key === " ") {
      if (this.#down) this.#lift();
      else {
        this.#down = true;
        this.strokes.push([{ ...this.#pen }]);
        this.#announce("Pen down");
      }
    } else return;
    event.preventDefault();
    this.#keyboard = true;
    if (this.#down) this.#changed();
    else this.#draw();
  }

  #lift(): void {
    if (!this.#down) return;
    this.#down = false;
    this.#announce("Pen up");
    this.#changed();
  }

  #changed(): void {
    this.#draw();
    this.onChange();
  }

  #draw(): void {
    const ratio = devicePixelRatio || 1;
    const size = Math.round(this.#canvas.clientWidth * ratio);
    // Setting the size also clears the canvas.
    this.#canvas.width = this.#canvas.height = size;
    const context = this.#canvas.getContext("2d")!;
    const style = getComputedStyle(this.#canvas);
    context.scale(size / EXTENT, size / EXTENT);
    trace(context, this.strokes, style.color);
    if (!this.strokes.length && !this.#keyboard) {
      context.fillStyle = style.getPropertyValue("--soft");
      context.font = "16px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillText(this.hint, EXTENT / 2, EXTENT / 2);
    }
    if (!this.#keyboard) return;
    context.beginPath();
    context.arc(this.#pen.x, this.#pen.y, PEN / 2, 0, 2 * Math.PI);
    context.strokeStyle = style.getPropertyValue("--accent");
    context.lineWidth = 3;
    context.stroke();
    if (this.#down) {
      context.fillStyle = style.getPropertyValue("--accent");
      context.fill();
    }
  }
}

function trace(
  context: CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D,
  strokes: readonly Stroke[],
  color: string,
): void {
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = PEN;
  context.strokeStyle = color;
  for (const [first, ...others] of strokes) {
    context.beginPath();
    context.moveTo(first!.x, first!.y);
    // A dot, too, is a line: of length 0, with round ends.
    for (const { x, y } of others.length ? others : [first!]) context.lineTo(x, y);
    context.stroke();
  }
}
