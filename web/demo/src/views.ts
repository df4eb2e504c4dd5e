/** Shows readings: bars at the classes, pictures with ticks and crosses, accuracies. */

import { SIZE } from "./preprocess.js";
import type { Drawing, Reading } from "./protocol.js";

/** What the base model and the user's model read on a drawing; `after` is null if there is only the base model. */
export interface Readings {
  readonly before: Reading;
  readonly after: Reading | null;
}

/** Names by the numbers of their classes, in the order of the models' outputs. */
export type Classes = ReadonlyMap<number, string>;

/** Returns the class that a reading gives the highest probability; -1 if several have it: the model knows none of them. */
export function bestOf(reading: Reading): number {
  const highest = Math.max(...reading);
  const best = reading.indexOf(highest);
  return best === reading.lastIndexOf(highest) ? best : -1;
}

const nameOf = (reading: Reading, classes: Classes): string => [...classes.values()][bestOf(reading)] ?? "nothing";
const isRight = (reading: Reading, { label }: Drawing, classes: Classes): boolean =>
  [...classes.keys()][bestOf(reading)] === label;

/** A choice of one class, each with a bar per model. */
export class Choice {
  #inputs: HTMLInputElement[] = [];
  #shown = "";

  constructor(private readonly container: Element) {}

  /** Shows these classes; the chosen one stays chosen. */
  show(classes: Classes): void {
    const shown = JSON.stringify([...classes]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const { chosen } = this;
    const labels = [...classes].map(([id, name]) => {
      const label = document.createElement("label");
      label.innerHTML =
        `<input type="radio" name="digit" value="${id}" />` +
        `<i class="before"></i><i class="after"></i><span><bdi></bdi></span>`;
      label.querySelector("bdi")!.textContent = label.title = name;
      return label;
    });
    this.container.replaceChildren(...labels);
    this.#inputs = labels.map((label) => label.querySelector("input")!);
    if (chosen !== null) this.choose([...classes.keys()].indexOf(chosen));
  }

  /** The chosen class, null if none is. */
  get chosen(): number | null {
    const input = this.#inputs.find(({ checked }) => checked);
    return input ? Number(input.value) : null;
  }

  /** Chooses a class by its place, if there is one. */
  choose(place: number): void {
    if (this.#inputs[place]) this.#inputs[place].checked = true;
  }

  /** Sets the bars; null stands for no drawing. */
  showBars(readings: Readings | null): void {
    this.#inputs.forEach((input, place) => {
      for (const model of ["before", "after"] as const) {
        const bar = input.parentElement!.querySelector<HTMLElement>(`.${model}`)!;
        bar.hidden = !!readings && !readings[model];
        bar.style.setProperty("--p", (readings?.[model]?.[place] ?? 0).toFixed(3));
      }
    });
  }
}

/** Returns a sentence on a reading, e.g. "The model reads 4 (97%)". */
export function sentence({ before, after }: Readings, classes: Classes): string {
  const [first, second] = [before, after].map((reading) => {
    if (!reading) return "";
    const percent = bestOf(reading) < 0 ? "" : ` (${Math.round(100 * Math.max(...reading))}%)`;
    return nameOf(reading, classes) + percent;
  });
  if (!second) return `The model reads ${first}`;
  return bestOf(before) < 0 ? `Now: ${second}` : `Before: ${first}. Now: ${second}`;
}

/** Shows the drawings as small pictures, the last one first, with ticks and crosses for what the models read. */
export function showDrawings(
  list: Element,
  drawings: readonly Drawing[],
  classes: Classes,
  of: (drawing: Drawing) => Readings | undefined,
): void {
  list.replaceChildren(
    ...drawings.toReversed().map((drawing) => {
      const item = document.createElement("li");
      const canvas = document.createElement("canvas");
      canvas.width = canvas.height = SIZE;
      const context = canvas.getContext("2d")!;
      const pixels = context.createImageData(SIZE, SIZE);
      // Ink as opacity: the colour comes from the style sheet, so that both colour schemes work.
      drawing.image.forEach((value, i) => (pixels.data[4 * i + 3] = Math.round(255 * value)));
      context.putImageData(pixels, 0, 0);
      canvas.setAttribute("role", "img");
      item.classList.toggle("held-out", drawing.heldOut);
      const marks = document.createElement("span");
      const called = document.createElement("bdi");
      called.textContent = classes.get(drawing.label)!;
      marks.append(called, " ");
      let name = `Drawing of ${called.textContent}${drawing.heldOut ? ", held out" : ""}`;
      const readings = of(drawing);
      for (const [when, reading] of [
        ["before training", readings?.before],
        ["now", readings?.after],
      ] as const) {
        if (!reading) continue;
        const right = isRight(reading, drawing, classes);
        const mark = document.createElement("b");
        mark.className = right ? "right" : "wrong";
        mark.textContent = right ? "✓" : "✗";
        marks.append(mark);
        name += `, ${when} read as ${nameOf(reading, classes)}`;
      }
      canvas.setAttribute("aria-label", name);
      marks.setAttribute("aria-hidden", "true");
      item.append(canvas, marks);
      return item;
    }),
  );
}

/** Shows how many of the held-out drawings a model reads, e.g. "80%" and "8 of 10"; "–" if that is not known. */
export function showAccuracy(
  percent: Element,
  count: Element,
  heldOut: readonly Drawing[],
  classes: Classes,
  read: (drawing: Drawing) => Reading | null | undefined,
): void {
  const readings = heldOut.map(read);
  const known = heldOut.length > 0 && readings.every((reading) => reading);
  const right = readings.filter((reading, i) => reading && isRight(reading, heldOut[i]!, classes)).length;
  percent.textContent = known ? `${Math.round((100 * right) / heldOut.length)}%` : "–";
  count.textContent = known ? `${right} of ${heldOut.length}` : "";
}
