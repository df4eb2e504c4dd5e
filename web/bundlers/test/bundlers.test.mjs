/** The projects, built and from their development servers, train in Chromium with the losses of Python. */

import assert from "node:assert/strict";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";
import { serve, startBrowser } from "../../demo/test/support.mjs";
import { maxDifference } from "../../test/support.mjs";
import { BUNDLERS, folderOf, freePort, install, prepare, run, start } from "./support.mjs";

const TOLERANCE = 1e-5;
const chosen = process.env.ONNXTRAIN_BUNDLER ? process.env.ONNXTRAIN_BUNDLER.split(",") : BUNDLERS;
let expected, browser;

before(
  async () => {
    expected = prepare();
    browser = await startBrowser();
  },
  { timeout: 300_000 },
);
after(() => browser?.close());

/** How a project is served: what its users call, with what it ends. */
const SERVERS = {
  vite: {
    preview: async (folder) => start(folder, "preview", "--port", String(await freePort())),
    dev: async (folder) => start(folder, "dev", "--port", String(await freePort())),
  },
  webpack: {
    "any server": (folder) => serve(0, join(folder, "public")),
    dev: async (folder) => start(folder, "dev", "--port", String(await freePort())),
  },
  esbuild: { "any server": (folder) => serve(0, join(folder, "public")) },
  next: {
    start: async (folder) => start(folder, "start", "--port", String(await freePort())),
    dev: async (folder) => start(folder, "dev", "--port", String(await freePort())),
  },
};

/** Opens a page and waits until page and worker have trained; returns what it shows and what the console says. */
async function trained(t, url) {
  const page = await browser.context.newPage();
  t.after(() => page.close());
  const messages = [];
  page.on("console", (message) => {
    // The pages have no icon.
    if (["warning", "error"].includes(message.type()) && !message.location().url.endsWith("/favicon.ico"))
      messages.push(message.text());
  });
  page.on("pageerror", (error) => messages.push(String(error)));
  await page.goto(url);
  const button = page.getByRole("button", { name: "Train" });
  if (await button.count()) {
    // React answers once it has taken over the server's page.
    await button.evaluate(async (element) => {
      while (!Object.keys(element).some((key) => key.startsWith("__react")))
        await new Promise((resolve) => setTimeout(resolve, 50));
    });
    await button.click();
  }
  const numbers = () => page.locator("#worker").textContent();
  try {
    await page.waitForFunction(
      () => document.querySelector("#worker")?.textContent.match(/\d\.\d{6}/g)?.length === 20,
      undefined,
      { timeout: 90_000 },
    );
  } catch (error) {
    throw new Error(
      `the page shows ${await page.locator("body").innerText()}; the console says ${messages.join("\n")}`,
      { cause: error },
    );
  }
  const losses = (text) => text.match(/\d\.\d{6}/g).map(Number);
  const shown = await numbers();
  return {
    page: losses(await page.locator("#page").textContent()),
    worker: losses(shown),
    threads: Number(/(\d) thread/.exec(shown)[1]),
    messages,
  };
}

function check(t, { page, worker, threads, messages }, expectedThreads) {
  for (const losses of [page, worker]) {
    const difference = maxDifference(losses, expected);
    t.diagnostic(`largest difference from Python: ${difference.toExponential(1)}`);
    assert.ok(difference <= TOLERANCE, `losses differ by ${difference}`);
  }
  // Training must have changed something, or equal losses would say little.
  assert.ok(expected.at(-1) < expected[0] - 0.05);
  assert.equal(threads, expectedThreads);
  assert.deepEqual(messages, []);
}

for (const bundler of chosen) {
  describe(bundler, () => {
    const folder = folderOf(bundler);
    before(
      () => {
        install(bundler);
        run(folder, "npm", "run", "build");
      },
      { timeout: 600_000 },
    );
    for (const [name, open] of Object.entries(SERVERS[bundler])) {
      it(`${name}: page, and worker with two threads`, { timeout: 240_000 }, async (t) => {
        const server = await open(folder);
        t.after(server.close);
        check(t, await trained(t, server.url), 2);
      });
    }
  });
}
