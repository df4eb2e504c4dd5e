/** Keeps what a stranger's manifest and models name inside of the folder that the caller named. */

const DOTS_ONLY = /^[. ]+$/;
// ":" begins a scheme, a drive or a stream of Windows; "\" is a separator there. Servers may decode what is encoded.
const FORBIDDEN = /[\\:\p{Cc}]|%(?:2e|2f|5c|00|25)/iu;

/**
 * Returns a relative file name as segments of a path, e.g. ["data", "weights.bin"].
 *
 * @throws Error unless the name is that of a file in the folder or below it.
 */
export function segments(name: string): string[] {
  const parts = name.split("/");
  if (FORBIDDEN.test(name) || parts.some((part) => part === "" || DOTS_ONLY.test(part)))
    throw new Error(
      `'${name}' is no file in the folder of the run or below it, where all files of a run are; no other file is read`,
    );
  // ONNX Runtime takes the offset of such data for an address in memory.
  if (name.includes("_ORT_MEM_ADDR_")) throw new Error(`'${name}' is no file`);
  return parts;
}

/** Returns the URL of a file by its name relative to `folder`, whose path ends with "/"; throws an Error as `segments`. */
export function urlInside(folder: URL, name: string): URL {
  const url = new URL(folder);
  url.pathname += segments(name).map(encodeURIComponent).join("/");
  return url;
}

/** The part of Node's fs that is used. */
interface FileSystem {
  realpath(path: URL): Promise<string>;
  stat(path: string): Promise<{ isFile(): boolean }>;
  readFile(path: string): Promise<Uint8Array>;
}

/** Reads a file of `folder` in Node; throws an Error for a link that leads out of it, and for what is no file. */
export async function readInside(folder: URL, file: URL): Promise<Uint8Array> {
  // The names are put together so that bundlers for pages do not look for these modules.
  const fs = (await import(
    /* @vite-ignore */ /* webpackIgnore: true */ ["node", "fs/promises"].join(":")
  )) as FileSystem;
  const { sep } = (await import(/* @vite-ignore */ /* webpackIgnore: true */ ["node", "path"].join(":"))) as {
    sep: string;
  };
  const [base, path] = [await fs.realpath(folder), await fs.realpath(file)];
  if (!path.startsWith(base.endsWith(sep) ? base : base + sep))
    throw new Error("it is a link to a file outside of the folder; copy the file into the folder");
  // A pipe would be waited for without end.
  if (!(await fs.stat(path)).isFile()) throw new Error("it is no ordinary file");
  return new Uint8Array(await fs.readFile(path));
}
