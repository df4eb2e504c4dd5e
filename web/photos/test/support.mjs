/** What the tests of the page share. */

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { serve as serveFolder } from "../../demo/serve.mjs";
import { ready, startBrowser } from "../../demo/test/support.mjs";

export { ready };

const here = dirname(fileURLToPath(import.meta.url));
export const dist = join(here, "..", "dist");
const python = process.env.PYTHON ?? join(here, "..", "..", "..", ".venv", "bin", "python");

/** Serves the page. */
export const serve = () => serveFolder(0, dist);

/** Runs a Python script of this folder and returns the JSON that it prints. */
export function runPython(script, ...args) {
  // One thread: more of them would wait for each other.
  const env = { ...process.env, OMP_NUM_THREADS: "1" };
  const options = { encoding: "utf8", stdio: ["ignore", "pipe", "inherit"], maxBuffer: 2 ** 26, env };
  return JSON.parse(execFileSync(python, [join(here, script), ...args], options));
}

/** Runs onnxtrain's command. */
export function runOnnxtrain(...args) {
  execFileSync(python, ["-m", "onnxtrain", ...args], { stdio: ["ignore", "pipe", "inherit"] });
}

/** Imports a module of the page, in Node. */
export async function load(name) {
  const { outputFiles } = await build({
    entryPoints: [join(here, "..", "src", `${name}.ts`)],
    bundle: true,
    format: "esm",
    platform: "node",
    alias: { "onnxtrain-web": join(here, "..", "..", "src", "index.ts") },
    write: false,
  });
  return import(`data:text/javascript;base64,${Buffer.from(outputFiles[0].contents).toString("base64")}`);
}

/**
 * Opens the page in headless Chromium. `camera`: a film that the camera shows, true for Chromium's own one, false for no
 * camera; `allowed`: whether the page may use it.
 */
export async function open(t, { camera = false, allowed = true, ...options } = {}) {
  const server = await serve();
  const { context, close } = await startBrowser({
    args: [
      "--no-sandbox",
      "--disable-gpu",
      ...(camera ? ["--use-fake-device-for-media-stream"] : []),
      ...(camera && allowed ? ["--use-fake-ui-for-media-stream"] : []),
      ...(typeof camera === "string" ? [`--use-file-for-fake-video-capture=${camera}`] : []),
    ],
    ...options,
  });
  t.after(async () => {
    await close();
    await server.close();
  });
  const problems = [];
  const tab = async () => {
    const page = await context.newPage();
    page.setDefaultTimeout(120_000);
    page.on("pageerror", (error) => problems.push(String(error)));
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && problems.push(message.text()));
    await page.goto(server.url);
    await ready(page);
    return page;
  };
  return { context, tab, page: await tab(), problems, url: server.url };
}

export const status = (page) => page.getByRole("status").textContent();
export const text = (page, label) => page.getByLabel(label, { exact: true }).textContent();
export const button = (page, name) => page.getByRole("button", { name, exact: true });

/** Waits for a message. */
export async function message(page, pattern) {
  await page.getByRole("status").filter({ hasText: pattern }).waitFor();
}

export async function addClass(page, name) {
  await page.getByLabel("Name of a new class").fill(name);
  await button(page, "Add class").click();
  await page.getByLabel(`Name of the class ${name}`).waitFor();
}

/** Adds files of photos to a class, and waits until they are learned. */
export async function addFiles(page, name, ...files) {
  await page.getByLabel(`Add files to ${name}`).setInputFiles(files);
  await ready(page);
}

let folder;
/** Returns the path of a file that fixtures.py has written. */
export function fixture(name) {
  if (!folder) {
    folder = mkdtempSync(join(tmpdir(), "onnxtrain-photos-"));
    process.on("exit", () => rmSync(folder, { recursive: true, force: true }));
    runPython("fixtures.py", folder);
  }
  return join(folder, name);
}

/** Returns the paths of the photos of a thing. */
export const photosOf = (thing, count = 5) => Array.from({ length: count }, (_, i) => fixture(`${thing}-${i}.png`));

/** Opens a menu entry that may be in the menu. */
export async function openMenu(page) {
  await button(page, "Files").click();
}

/** Presses a button that saves a file, and returns the file's path. */
export async function download(page, name) {
  await openMenu(page);
  const saving = page.waitForEvent("download");
  await button(page, name).click();
  const path = await (await saving).path();
  await ready(page);
  return path;
}
