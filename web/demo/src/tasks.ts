/** What the page can learn: digits, or sketches whose names the user types. */

/** A task, with the texts in which it differs from the other. */
export interface Task {
  readonly id: TaskId;
  /** Names of its classes; null if the user types them. */
  readonly names: readonly string[] | null;
  readonly title: string;
  readonly intro: string;
  /** Shown on the empty drawing area. */
  readonly hint: string;
  /** Label of the drawing area. */
  readonly area: string;
  readonly legend: string;
  readonly keys: string;
  /** Keys that choose a class, in the order of the classes. */
  readonly choosing: string;
  /** How the accuracy is measured. */
  readonly measured: string;
  /** Shown while there are no drawings. */
  readonly empty: string;
  readonly ready: string;
  readonly draw: string;
  readonly choose: string;
  /** Before the ending of the saved models' names. */
  readonly file: string;
  readonly drawings: string;
  readonly epochs: number;
  /** Number of classes of which drawings are needed to train. */
  readonly least: number;
  /** Names a drawing in a message. */
  one(name: string): string;
}

export type TaskId = "digits" | "sketches";

const measured = (each: string, base: string): string =>
  `Measured on drawings that training does not see: your second one, the second of each ${each}, then every third. ` +
  `Before: ${base}; now: yours.`;
const keys = (choose: string): string =>
  `Keys: arrows move the pen, with Shift faster; Space lowers and raises it; ${choose} choose; Enter adds.`;

export const TASKS: readonly Task[] = [
  {
    id: "digits",
    names: Array.from("0123456789"),
    title: "Teach it your handwriting",
    intro:
      "A small network reads digits. Draw some of yours, press Train, and watch it learn them. No drawing leaves this browser.",
    hint: "Draw a digit here",
    area: "Drawing area: draw one digit",
    legend: "Which digit is it?",
    keys: keys("0 to 9"),
    choosing: "0123456789",
    measured: measured("digit", "the base model"),
    empty: "None yet. Two drawings of each digit are a good start.",
    ready: "Ready: draw a digit, choose which one it is, and press Add",
    draw: "Draw a digit first, then choose which one it is",
    choose: "Choose which digit this is, then press Add",
    file: "handwriting",
    drawings: "drawings.json",
    epochs: 5,
    least: 1,
    one: (name) => `a ${name}`,
  },
  {
    id: "sketches",
    names: null,
    title: "Teach it your sketches",
    intro:
      "Type names, e.g. cat and house, draw a few of each, and press Train: the network learns to tell them apart. No drawing leaves this browser.",
    hint: "Draw a sketch here",
    area: "Drawing area: draw one sketch",
    legend: "What is it?",
    keys: keys("1 to 9"),
    choosing: "1234567890",
    measured: measured("name", "a network that knows none of your names"),
    empty: "None yet. Three drawings of each name are a good start.",
    ready: "Ready: press Names and type what you will draw",
    draw: "Draw something first, then choose its name",
    choose: "Choose the name of this drawing, then press Add",
    file: "sketches",
    drawings: "sketches.json",
    epochs: 10,
    least: 2,
    one: (name) => `a drawing of “${name}”`,
  },
];
