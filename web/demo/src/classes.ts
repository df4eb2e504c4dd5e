/** The classes whose names the user types, as the journal tells them. */

import type { Entry, Naming } from "./journal.js";
import { Refusal } from "./store.js";
import { MAX_NAMES } from "./names.js";
import type { Classes } from "./views.js";

/** Returns the names by the numbers of their classes, in the order in which they were added. */
export function namesIn(entries: readonly Entry[]): Map<number, string> {
  const names = new Map<number, string>();
  for (const [id, name] of entries.flatMap((entry) => (entry.kind === "names" ? entry.names : []))) {
    if (name === null) names.delete(id);
    else names.set(id, name);
  }
  return names;
}

/** Returns a number for a class that none has had before, also none of an earlier model. */
function newClass(entries: readonly Entry[]): number {
  const ids = entries.flatMap((entry) => {
    if (entry.kind === "names") return entry.names.map(([id]) => id);
    return entry.kind === "model" ? entry.classes : [];
  });
  return Math.max(-1, ...ids) + 1;
}

/** The classes of names. */
export interface Assigned {
  /** Number of the class per name. */
  readonly ids: readonly number[];
  /** An entry with the names that are new. */
  readonly added: readonly { kind: "names"; names: readonly Naming[] }[];
}

/** Finds classes for names; new names become new classes. `file`, which has the names, begins the message of an error. */
export function assign(entries: readonly Entry[], names: readonly string[], file: string): Assigned {
  const known = new Map([...namesIn(entries)].map(([id, name]) => [name, id]));
  const first = newClass(entries);
  const added = names.filter((name) => !known.has(name)).map((name, i): Naming => [first + i, name]);
  if (known.size + added.length > MAX_NAMES)
    throw new Refusal(`${file} would make more than ${MAX_NAMES} names: nothing has changed`);
  for (const [id, name] of added) known.set(name!, id);
  return { ids: names.map((name) => known.get(name)!), added: added.length ? [{ kind: "names", names: added }] : [] };
}

/** Returns what an undo has changed in the names. */
export function difference(before: Classes, now: Classes): string {
  const gone = [...before].filter(([id]) => !now.has(id)).map(([, name]) => name);
  if (gone.length)
    return `Took back the name${gone.length > 1 ? "s" : ""} ${gone.map((name) => `“${name}”`).join(", ")}`;
  const changed = [...now].find(([id, name]) => before.get(id) !== name);
  if (!changed) return "Took back a change of the names";
  const [id, name] = changed;
  return before.has(id) ? `“${before.get(id)}” is called “${name}” again` : `“${name}” is back, with its drawings`;
}
