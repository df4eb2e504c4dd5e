/** Shows the classes as cards: name, bar, photos. */

import { blobOf } from "./pictures.js";
import type { Class, Photo } from "./project.js";
import type { Reading } from "./protocol.js";

/** What the model reads, by the ids of its classes. */
export interface Read {
  readonly labels: readonly string[];
  readonly reading: Reading;
}

/** Returns the id of the class with the highest probability. */
export const bestOf = ({ labels, reading }: Read): string => labels[reading.indexOf(Math.max(...reading))]!;

/** What the user does to a card. */
export interface Actions {
  rename(id: string, name: string): void;
  remove(id: string): void;
  snap(id: string): void;
  add(id: string, files: readonly File[]): void;
  choose(hash: string): void;
  discard(hash: string): void;
}

const part = <T extends Element = HTMLElement>(root: Element, name: string): T => root.querySelector<T>(`.${name}`)!;

/** The photos of a class, as buttons. */
class Thumbnails {
  readonly #items = new Map<string, HTMLLIElement>();

  constructor(
    private readonly list: Element,
    private readonly actions: Actions,
  ) {}

  update(photos: readonly Photo[], describe: (photo: Photo, index: number) => { text: string; mark: string }): void {
    const present = new Set(photos.map(({ hash }) => hash));
    for (const [hash, item] of this.#items) {
      if (present.has(hash)) continue;
      this.#items.delete(hash);
      const hadFocus = item.contains(document.activeElement);
      const neighbour = item.nextElementSibling ?? item.previousElementSibling;
      item.remove();
      if (hadFocus) (neighbour?.querySelector<HTMLElement>(".bin") ?? (this.list as HTMLElement)).focus();
    }
    photos.forEach((photo, index) => {
      let item = this.#items.get(photo.hash);
      if (!item) {
        item = this.#made(photo);
        this.#items.set(photo.hash, item);
      }
      if (this.list.children[index] !== item) this.list.insertBefore(item, this.list.children[index] ?? null);
      const { text, mark } = describe(photo, index);
      item.classList.toggle("held-out", photo.heldOut);
      item.querySelector("img")!.alt = text;
      part(item, "bin").ariaLabel = `Remove photo ${index + 1}`;
      const shown = part(item, "mark");
      shown.textContent = mark;
      shown.classList.toggle("wrong", mark === "✗");
    });
  }

  #made({ hash, picture }: Photo): HTMLLIElement {
    const item = document.createElement("li");
    item.innerHTML =
      `<button type="button" class="choose"><img width="56" height="56" /></button>` +
      `<b class="mark" aria-hidden="true"></b><button type="button" class="bin">✕</button>`;
    const image = item.querySelector("img")!;
    image.src = URL.createObjectURL(blobOf(picture));
    image.onload = image.onerror = () => URL.revokeObjectURL(image.src);
    part(item, "choose").onclick = () => this.actions.choose(hash);
    part(item, "bin").onclick = () => this.actions.discard(hash);
    return item;
  }
}

/** The card of a class. */
class Card {
  readonly element = document.createElement("li");
  readonly #thumbnails: Thumbnails;
  #name = "";

  constructor(id: string, actions: Actions) {
    this.element.className = "class";
    this.element.dataset.id = id;
    this.element.innerHTML =
      `<div class="top"><input class="name" maxlength="40" autocomplete="off" />` +
      `<span class="percent" aria-hidden="true"></span><button type="button" class="remove">✕</button></div>` +
      `<i class="bar"></i>` +
      `<div class="row"><button type="button" class="snap">Take photo</button>` +
      `<label class="button">Add files<input class="add" type="file" accept="image/*" multiple /></label>` +
      `<small class="count"></small></div><ul class="photos" tabindex="-1"></ul>`;
    const name = part<HTMLInputElement>(this.element, "name");
    name.onchange = () => {
      actions.rename(id, name.value.trim());
      // Until the new name is kept.
      name.value = this.#name;
    };
    part(this.element, "remove").onclick = () => actions.remove(id);
    part(this.element, "snap").onclick = () => actions.snap(id);
    const files = part<HTMLInputElement>(this.element, "add");
    files.onchange = () => {
      actions.add(id, [...(files.files ?? [])]);
      // So that the same file can be chosen again.
      files.value = "";
    };
    this.#thumbnails = new Thumbnails(part(this.element, "photos"), actions);
  }

  update(
    { name }: Class,
    photos: readonly Photo[],
    nameOf: (id: string) => string,
    read: (photo: Photo) => Read | undefined,
  ): void {
    const input = part<HTMLInputElement>(this.element, "name");
    if (this.#name !== name) input.value = this.#name = name;
    input.ariaLabel = `Name of the class ${name}`;
    part(this.element, "remove").ariaLabel = `Remove the class ${name}`;
    part(this.element, "snap").ariaLabel = `Take photo of ${name}`;
    part(this.element, "add").ariaLabel = `Add files to ${name}`;
    part(this.element, "photos").ariaLabel = `Photos of ${name}`;
    const heldOut = photos.filter((photo) => photo.heldOut).length;
    const count = `${photos.length} photo${photos.length === 1 ? "" : "s"}`;
    part(this.element, "count").textContent = heldOut ? `${count}, ${heldOut} held out` : count;
    this.#thumbnails.update(photos, (photo, index) => {
      let text = `Photo ${index + 1} of ${name}${photo.heldOut ? ", held out" : ""}`;
      const result = read(photo);
      if (!result) return { text, mark: "" };
      const best = bestOf(result);
      text += `, read as ${nameOf(best)}`;
      return { text, mark: photo.heldOut ? (best === photo.label ? "✓" : "✗") : "" };
    });
  }

  /** Shows how probable the class is; null if that is not known. */
  show(probability: number | null): void {
    part(this.element, "bar").style.setProperty("--p", (probability ?? 0).toFixed(3));
    part(this.element, "percent").textContent = probability === null ? "" : `${Math.round(100 * probability)}%`;
  }
}

/** The cards of all classes. */
export class Cards {
  readonly #cards = new Map<string, Card>();
  #current = "";

  constructor(
    private readonly list: Element,
    private readonly actions: Actions,
  ) {
    // Photos that are pasted go to the class that was used last.
    for (const event of ["focusin", "pointerdown"])
      list.addEventListener(event, ({ target }) => {
        const id = (target as Element).closest<HTMLElement>(".class")?.dataset.id;
        if (id) this.setCurrent(id);
      });
  }

  /** The id of the class that was used last, "" if there is none. */
  get current(): string {
    return this.#cards.has(this.#current) ? this.#current : ([...this.#cards.keys()].at(-1) ?? "");
  }

  setCurrent(id: string): void {
    this.#current = id;
    for (const [other, { element }] of this.#cards)
      if (other === this.current) element.ariaCurrent = "true";
      else element.removeAttribute("aria-current");
  }

  update(classes: readonly Class[], photos: readonly Photo[], read: (photo: Photo) => Read | undefined): void {
    const nameOf = (id: string): string => classes.find((item) => item.id === id)?.name ?? "";
    for (const [id, { element }] of this.#cards) {
      if (classes.some((item) => item.id === id)) continue;
      this.#cards.delete(id);
      const hadFocus = element.contains(document.activeElement);
      element.remove();
      if (hadFocus) (this.list as HTMLElement).focus();
    }
    classes.forEach((item, index) => {
      let card = this.#cards.get(item.id);
      if (!card) {
        card = new Card(item.id, this.actions);
        this.#cards.set(item.id, card);
        this.#current = item.id;
      }
      if (this.list.children[index] !== card.element)
        this.list.insertBefore(card.element, this.list.children[index] ?? null);
      card.update(
        item,
        photos.filter(({ label }) => label === item.id),
        nameOf,
        read,
      );
    });
    this.setCurrent(this.current);
  }

  /** Shows the bars of a reading, null for none. */
  show(read: Read | null): void {
    for (const [id, card] of this.#cards) {
      const index = read?.labels.indexOf(id) ?? -1;
      card.show(index < 0 ? null : read!.reading[index]!);
    }
  }

  /** Moves the card of a class into view. */
  reveal(id: string): void {
    this.#cards.get(id)?.element.scrollIntoView({ block: "nearest" });
  }
}
