/** Shows readings: bars over the digits, pictures with ticks and crosses, accuracies. */

import { SIZE } from "./preprocess.js";
import type { Drawing, Reading } from "./protocol.js";

/** What the base model and the user's model read on a drawing; `after` is null if there is only the base model. */
export interface Readings {
  readonly before: Reading;
  readonly after: Reading | null;
}

/** Returns the digit that a reading gives the highest probability. */
export const bestOf = (reading: Reading): number => reading.indexOf(Math.max(...reading));

/** Fills `digits` with a choice of ten digits, each with a bar per model; returns the inputs and how to set the bars. */
export function digitChoice(digits: Element): {
  radios: HTMLInputElement[];
  showBars: (readings: Readings | null) => void;
} {
  const labels = Array.from({ length: 10 }, (_, digit) => {
    const label = document.createElement("label");
    label.innerHTML =
      `<input type="radio" name="digit" value="${digit}" />` +
      `<i class="before"></i><i class="after"></i><span>${digit}</span>`;
    return label;
  });
  digits.replaceChildren(...labels);
  return {
    radios: labels.map((label) => label.querySelector("input")!),
    showBars: (readings) => {
      labels.forEach((label, digit) => {
        for (const model of ["before", "after"] as const) {
          const bar = label.querySelector<HTMLElement>(`.${model}`)!;
          bar.hidden = !!readings && !readings[model];
          bar.style.setProperty("--p", (readings?.[model]?.[digit] ?? 0).toFixed(3));
        }
      });
    },
  };
}

/** Returns a sentence on a reading, e.g. "The model reads 4 (97%)". */
export function sentence({ before, after }: Readings): string {
  const [first, second] = [before, after].map((reading) => {
    if (!reading) return "";
    const best = bestOf(reading);
    return `${best} (${Math.round(100 * reading[best]!)}%)`;
  });
  return second ? `Before: ${first}. Now: ${second}` : `The model reads ${first}`;
}

/** Shows the drawings as small pictures, the last one first, with ticks and crosses for what the models read. */
export function showDrawings(
  list: Element,
  drawings: readonly Drawing[],
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
      marks.textContent = `${drawing.label} `;
      let name = `Drawing of ${drawing.label}${drawing.heldOut ? ", held out" : ""}`;
      const readings = of(drawing);
      for (const [when, reading] of [
        ["before training", readings?.before],
        ["now", readings?.after],
      ] as const) {
        if (!reading) continue;
        const right = bestOf(reading) === drawing.label;
        const mark = document.createElement("b");
        mark.className = right ? "right" : "wrong";
        mark.textContent = right ? "✓" : "✗";
        marks.append(mark);
        name += `, ${when} read as ${bestOf(reading)}`;
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
  read: (drawing: Drawing) => Reading | null | undefined,
): void {
  const readings = heldOut.map(read);
  const known = heldOut.length > 0 && readings.every((reading) => reading);
  const right = readings.filter((reading, i) => reading && bestOf(reading) === heldOut[i]!.label).length;
  percent.textContent = known ? `${Math.round((100 * right) / heldOut.length)}%` : "–";
  count.textContent = known ? `${right} of ${heldOut.length}` : "";
}
