/** The menu in which the user adds, changes and removes names. */

import { MAX_NAMES, nameFrom } from "./names.js";
import type { Classes } from "./views.js";

/** What the user asks for. */
export interface NameActions {
  add(name: string): void;
  rename(id: number, name: string): void;
  remove(id: number): void;
}

/** A form for a new name, and a list of the names. */
export class NameMenu {
  #classes: Classes = new Map();
  /** Where a new name is typed. */
  readonly field: HTMLInputElement;

  constructor(
    private readonly form: HTMLFormElement,
    private readonly list: Element,
    private readonly actions: NameActions,
  ) {
    this.field = form.querySelector("input")!;
    this.field.addEventListener("input", () => this.field.setCustomValidity(""));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const name = this.#checked(this.field, null);
      if (name === null) return;
      this.field.value = "";
      actions.add(name);
    });
  }

  /** Lists these names. */
  show(classes: Classes): void {
    const full = classes.size >= MAX_NAMES;
    for (const control of this.form.querySelectorAll<HTMLInputElement | HTMLButtonElement>("input, button"))
      control.disabled = full;
    this.field.placeholder = full ? `At most ${MAX_NAMES} names` : "New name, e.g. cat";
    if (JSON.stringify([...classes]) === JSON.stringify([...this.#classes])) return;
    this.#classes = classes;
    this.list.replaceChildren(...[...classes].map(([id, name]) => this.#row(id, name)));
  }

  #row(id: number, name: string): HTMLLIElement {
    const row = document.createElement("li");
    row.innerHTML = `<input dir="auto" autocomplete="off" /><button type="button">Remove</button>`;
    const [input, remove] = [row.querySelector("input")!, row.querySelector("button")!];
    input.value = name;
    input.setAttribute("aria-label", `Rename ${name}`);
    remove.setAttribute("aria-label", `Remove ${name}`);
    input.addEventListener("input", () => input.setCustomValidity(""));
    input.addEventListener("change", () => {
      const changed = this.#checked(input, id);
      if (changed !== null && changed !== name) this.actions.rename(id, changed);
    });
    remove.addEventListener("click", () => this.actions.remove(id));
    return row;
  }

  /** Returns the name in a field; tells the user what is wrong and returns null if it cannot be one of `id`. */
  #checked(input: HTMLInputElement, id: number | null): string | null {
    try {
      const name = nameFrom(input.value);
      if ([...this.#classes].some(([other, taken]) => other !== id && taken === name))
        throw new Error(`There is a name “${name}” already`);
      return name;
    } catch (error) {
      input.setCustomValidity((error as Error).message);
      input.reportValidity();
      return null;
    }
  }
}
