/**
 * Measures the pages in headless Chromium, as a phone and as a desktop:
 * node web/scripts/figures.mjs [demo|adapt|photos ...]
 *
 * The pages must have been built (make web-page web-adapt-page web-photos-page). Prints a row of a table per page,
 * device and colour scheme: the first paint, what the first visit downloads, and by axe-core (the engine of Lighthouse's
 * accessibility audits) how many rules the page keeps and breaks, and how many texts have enough contrast. Below the
 * table it prints each rule that is broken and each error of the console, and exits with 1 if there are any.
 */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { serve, startBrowser } from "../demo/test/support.mjs";

const web = join(dirname(fileURLToPath(import.meta.url)), "..");
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const DEVICES = {
  phone: { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true },
  desktop: { viewport: { width: 1366, height: 768 } },
};

/** Opens a page in an empty profile, and returns its figures. */
async function measure(url, device, colorScheme) {
  // The service worker would download the same files once more into its cache.
  const { context, close } = await startBrowser({ ...DEVICES[device], colorScheme, serviceWorkers: "block" });
  try {
    const page = context.pages()[0];
    const requests = [];
    const errors = [];
    page.on("request", (request) => requests.push(request));
    page.on("pageerror", (error) => errors.push(String(error)));
    page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
    await page.goto(url);
    await page.locator('[aria-busy="false"]').waitFor();
    const paint = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime);
    let bytes = 0;
    for (const request of requests) {
      await (await request.response())?.finished();
      bytes += (await request.sizes()).responseBodySize;
    }
    await page.evaluate(axe);
    const { passes, violations } = await page.evaluate(() => globalThis.axe.run());
    return { paint, bytes, errors, passes, violations };
  } finally {
    await close();
  }
}

const names = process.argv.length > 2 ? process.argv.slice(2) : ["demo", "adapt"];
const notes = [];
const columns = [
  "page",
  "device",
  "colours",
  "first paint",
  "downloaded",
  "rules kept",
  "rules broken",
  "texts readable",
];
console.log(`| ${columns.join(" | ")} |\n${"|---".repeat(columns.length)}|`);
for (const name of names) {
  const server = await serve(0, join(web, name, "dist"));
  for (const device of Object.keys(DEVICES))
    for (const colours of ["light", "dark"]) {
      const { paint, bytes, errors, passes, violations } = await measure(server.url, device, colours);
      const contrast = passes.find(({ id }) => id === "color-contrast")?.nodes.length ?? 0;
      const cells = [`${(paint / 1000).toFixed(1)} s`, `${(bytes / 1e6).toFixed(2)} MB`, passes.length];
      console.log(`| ${[name, device, colours, ...cells, violations.length, contrast].join(" | ")} |`);
      const broken = violations.map(({ help, nodes }) => `${help}: ${nodes.map(({ target }) => target).join("; ")}`);
      notes.push(...[...broken, ...errors].map((note) => `${name}, ${device}, ${colours}: ${note}`));
    }
  await server.close();
}
console.log(notes.length ? `\n${notes.join("\n")}` : "\nNo rule is broken, and the console has no error.");
process.exit(notes.length ? 1 : 0);
