/** Draws the loss curve as SVG. */

const [BOTTOM, TOP, RIGHT] = [18, 8, 4];
// Width of a character of the axis.
const CHARACTER = 6.5;

/** Returns the values of an axis from 0 to at least `highest`, as texts that are exactly the values. */
export function ticks(highest: number): string[] {
  const power = Math.floor(Math.log10(highest / 3));
  // Three to five of them, at multiples of 1, 2 or 5.
  const factor = [1, 2, 5, 10].find((candidate) => candidate * 10 ** power >= highest / 3) ?? 10;
  const step = factor * 10 ** power;
  return Array.from({ length: Math.ceil(highest / step) + 1 }, (_, i) => (i * step).toFixed(Math.max(0, -power)));
}

/** Redraws the curve in `svg`, one unit a pixel. */
export function drawCurve(svg: SVGSVGElement, losses: readonly number[], steps: number): void {
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const description = svg.querySelector("desc")!;
  for (const child of [...svg.children]) if (child !== description) child.remove();
  description.textContent = losses.length
    ? `The loss of ${losses.length} steps goes from ${losses[0]!.toFixed(2)} to ${losses.at(-1)!.toFixed(2)}.`
    : "No training yet.";
  const add = (name: string, attributes: Record<string, string | number>, text = ""): void => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    element.textContent = text;
    svg.append(element);
  };
  const axis = ticks(Math.max(0.5, ...losses));
  const highest = Number(axis.at(-1));
  const left = 8 + CHARACTER * Math.max(...axis.map((text) => text.length));
  const x = (step: number): number => left + ((width - left - RIGHT) * step) / Math.max(1, steps - 1);
  const y = (loss: number): number => height - BOTTOM - ((height - BOTTOM - TOP) * loss) / highest;
  for (const text of axis) {
    const at = y(Number(text));
    add("line", { x1: left, x2: width - RIGHT, y1: at, y2: at, class: "grid" });
    add("text", { x: left - 5, y: at + 4, "text-anchor": "end" }, text);
  }
  add("text", { x: left, y: height - 3 }, "Loss by step");
  if (steps) add("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end" }, String(steps));
  if (!losses.length) return;
  const line = (values: readonly number[], name: string): void =>
    add("polyline", {
      points: values.map((loss, i) => `${x(i).toFixed(1)},${y(loss).toFixed(1)}`).join(" "),
      class: name,
    });
  line(losses, "single");
  // The mean of the last steps: single batches jump, and the trend is what matters.
  let mean = losses[0]!;
  line(
    losses.map((loss) => (mean += 0.25 * (loss - mean))),
    "trend",
  );
}
