/** Names of classes that the user types. */

/** The largest number of names. */
export const MAX_NAMES = 12;
const MAX_LENGTH = 24;

/**
 * Returns a name as it is kept: composed characters, single spaces, none at its ends.
 *
 * @throws Error with a message to the user if it cannot be the name of a class.
 */
export function nameFrom(text: string): string {
  const name = text.normalize("NFC").replace(/\s+/gu, " ").trim();
  if (!/[\p{L}\p{N}\p{P}\p{S}]/u.test(name)) throw new Error("Type a name of at least one character");
  if (/[\p{Cc}\p{Cs}]/u.test(name)) throw new Error("A name has no control characters");
  if ([...name].length > MAX_LENGTH) throw new Error(`A name has at most ${MAX_LENGTH} characters`);
  return name;
}

/** True if a value is a name as `nameFrom` returns it. */
export function isName(value: unknown): value is string {
  try {
    return typeof value === "string" && nameFrom(value) === value;
  } catch {
    return false;
  }
}
