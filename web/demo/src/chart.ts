/** Draws the loss curve as SVG. */

const [WIDTH, HEIGHT] = [320, 190];
const [LEFT, BOTTOM, TOP] = [30, 18, 8];

/** Redraws the curve in `svg`. */
export function drawCurve(svg: SVGSVGElement, losses: readonly number[], steps: number): void {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  const description = svg.querySelector("desc")!;
  for (const child of [...svg.children]) if (child !== description) child.remove();
  const add = (name: string, attributes: Record<string, string | number>, text = ""): void => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    element.textContent = text;
    svg.append(element);
  };
  const highest = Math.max(0.5, ...losses);
  const x = (step: number): number => LEFT + ((WIDTH - LEFT - 4) * step) / Math.max(1, steps - 1);
  const y = (loss: number): number => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * loss) / highest;
  for (const value of [0, highest / 2, highest]) {
    add("line", { x1: LEFT, x2: WIDTH - 4, y1: y(value), y2: y(value), class: "grid" });
    add("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, value.toFixed(1));
  }
  add("text", { x: WIDTH - 4, y: HEIGHT - 4, "text-anchor": "end" }, steps ? `step ${steps}` : "step");
  if (losses.length) {
    add("polyline", {
      points: losses.map((loss, i) => `${x(i).toFixed(1)},${y(loss).toFixed(1)}`).join(" "),
      class: "single",
    });
    // The mean of the last steps: single batches jump, and the trend is what matters.
    let mean = losses[0]!;
    const means = losses.map((loss) => (mean += 0.25 * (loss - mean)));
    add("polyline", {
      points: means.map((loss, i) => `${x(i).toFixed(1)},${y(loss).toFixed(1)}`).join(" "),
      class: "trend",
    });
  }
  description.textContent = losses.length
    ? `The loss of ${losses.length} steps goes from ${losses[0]!.toFixed(2)} to ${losses.at(-1)!.toFixed(2)}.`
    : "No training yet.";
}
