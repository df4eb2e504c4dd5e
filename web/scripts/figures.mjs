/**
 * Measures both pages with Lighthouse, as a phone and as a desktop: node web/scripts/figures.mjs [demo|adapt ...]
 *
 * The pages must have been built (make web-page web-adapt-page). npm downloads Lighthouse, which needs Chromium, into its
 * cache. Prints a row of a table per page and device, and below it every audit that Lighthouse marks.
 */

import { execFile } from "node:child_process";
import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { serve } from "../demo/serve.mjs";

// The newest for Node.js 20.
const LIGHTHOUSE = "lighthouse@12";
const CATEGORIES = ["performance", "accessibility", "best-practices"];
const CHROMIUM =
  process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
const web = join(dirname(fileURLToPath(import.meta.url)), "..");

/** Returns Lighthouse's report on an address. */
async function report(url, device) {
  const flags = [
    "--quiet",
    "--output=json",
    `--only-categories=${CATEGORIES}`,
    "--chrome-flags=--headless=new --no-sandbox --disable-gpu",
    ...(device === "desktop" ? ["--preset=desktop"] : []),
  ];
  const { stdout } = await promisify(execFile)(
    "npm",
    ["exec", "--yes", `--package=${LIGHTHOUSE}`, "--", "lighthouse", url, ...flags],
    {
      env: { ...process.env, CHROME_PATH: CHROMIUM },
      maxBuffer: 2 ** 28,
    },
  );
  return JSON.parse(stdout);
}

/** Returns the title of each audit of a category that is not passed, with the elements that it names. */
function marked({ audits, categories }) {
  const ids = CATEGORIES.slice(1).flatMap((name) => categories[name].auditRefs.map(({ id }) => id));
  return ids
    .map((id) => audits[id])
    .filter(({ score }) => score !== null && score < 1)
    .map(({ title, details }) => {
      const items = (details?.items ?? []).map(({ node, description, url }) => node?.selector ?? description ?? url);
      return `${title}${items.length ? `: ${items.join("; ")}` : ""}`;
    });
}

const names = process.argv.length > 2 ? process.argv.slice(2) : ["demo", "adapt"];
const notes = [];
console.log("| page | device | performance | accessibility | best practices | first paint | bytes | contrast |");
console.log("|---|---|---|---|---|---|---|---|");
for (const name of names) {
  const server = await serve(0, join(web, name, "dist"));
  for (const device of ["phone", "desktop"]) {
    const result = await report(server.url, device);
    const { audits } = result;
    const scores = CATEGORIES.map((category) => Math.round(100 * result.categories[category].score));
    const paint = `${(audits["first-contentful-paint"].numericValue / 1000).toFixed(1)} s`;
    const bytes = `${(audits["total-byte-weight"].numericValue / 1e6).toFixed(2)} MB`;
    const contrast = audits["color-contrast"].score === 1 ? "enough" : "too low";
    console.log(`| ${[name, device, ...scores, paint, bytes, contrast].join(" | ")} |`);
    notes.push(...marked(result).map((note) => `${name}, ${device}: ${note}`));
  }
  await server.close();
}
console.log(notes.length ? `\n${notes.join("\n")}` : "\nNo audit is marked.");
