/**
 * Chromium, Firefox and WebKit as the distribution ships them, with the same few verbs.
 *
 * Playwright drives stock Chromium, but only its own builds of the other two. Those speak the W3C's WebDriver commands:
 * Firefox over its Marionette socket, as geckodriver does, and WebKitGTK over HTTP by WebKitWebDriver.
 */

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { createServer, connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { CHROMIUM, startBrowser } from "./support.mjs";

// Nothing waits so long unless it fails; WebKit without a GPU on a busy machine takes a minute to open the page.
const LONG = 600_000;
const found = (names) => names.find(existsSync);
const onPath = (name) => spawnSync("which", [name], { encoding: "utf8" }).stdout.trim() || undefined;
const FIREFOX = process.env.FIREFOX ?? onPath("firefox-esr") ?? onPath("firefox");
const WEBKIT_DRIVER = process.env.WEBKIT_DRIVER ?? onPath("WebKitWebDriver");
const XVFB = onPath("Xvfb");
// The browser that WebKitWebDriver starts: Debian has it beside the library.
const MINI_BROWSER = found(
  ["4.1", "6.0", "4.0"].flatMap((version) => [
    `/usr/lib/${{ x64: "x86_64", arm64: "aarch64" }[process.arch]}-linux-gnu/webkit2gtk-${version}/MiniBrowser`,
    `/usr/lib/${{ x64: "x86_64", arm64: "aarch64" }[process.arch]}-linux-gnu/webkitgtk-${version}/MiniBrowser`,
    `/usr/libexec/webkit2gtk-${version}/MiniBrowser`,
  ]),
);

/** Calls `probe` until it returns something true, and returns it. */
async function until(what, probe, milliseconds = LONG) {
  const end = Date.now() + milliseconds;
  for (;;) {
    const value = await probe();
    if (value) return value;
    if (Date.now() > end) throw new Error(`${what}: nothing came in ${milliseconds / 1000} seconds`);
    await pause(50);
  }
}

/** Returns the processes that a process has started, directly or not, as [pid, command line]. */
function descendants(root) {
  const children = new Map();
  for (const name of readdirSync("/proc").filter((entry) => /^\d+$/.test(entry))) {
    try {
      const stat = readFileSync(`/proc/${name}/stat`, "utf8");
      const parent = Number(stat.slice(stat.lastIndexOf(")") + 2).split(" ")[1]);
      const command = readFileSync(`/proc/${name}/cmdline`, "utf8").replaceAll("\0", " ").trim();
      children.set(parent, [...(children.get(parent) ?? []), [Number(name), command]]);
    } catch {
      // It has ended meanwhile.
    }
  }
  const of = (pid) => (children.get(pid) ?? []).flatMap((child) => [child, ...of(child[0])]);
  return of(root);
}

function kill(pid) {
  try {
    process.kill(pid, "SIGKILL");
  } catch {
    // It has ended by itself.
  }
}

/** Ends a process and all that it has started. */
async function end(child) {
  const all = [...descendants(child.pid).map(([pid]) => pid), child.pid];
  const ended =
    child.exitCode !== null || child.signalCode !== null ? null : new Promise((done) => child.once("exit", done));
  all.forEach(kill);
  await ended;
}

/** A tab. Functions that it evaluates run in the page and may use nothing from here but their one argument. */
class Tab {
  /** Width in pixels below which its window does not go. */
  narrowest = 0;

  /** Waits until a function of the page returns something true, and returns it. */
  async waitFor(probe, argument, milliseconds = LONG) {
    return until(String(probe), () => this.evaluate(probe, argument), milliseconds);
  }

  /** Waits until the page is not busy, and its status matches. */
  async says(pattern, milliseconds = LONG) {
    let status;
    const idle = async () => {
      const [busy, said] = await this.evaluate(() => [
        document.getElementById("page")?.getAttribute("aria-busy"),
        document.getElementById("status")?.textContent ?? "",
      ]);
      status = said;
      return busy === "false" && pattern.test(said);
    };
    await until(`waiting for ${pattern}`, idle, milliseconds).catch((error) => {
      throw new Error(`${error.message}; the page says "${status}"`);
    });
    return status;
  }

  /** Clicks in the middle of the button, radio button or label with a name. */
  async click(name) {
    const found = await this.evaluate((wanted) => {
      const names = (node) => [node.getAttribute("aria-label"), node.textContent.trim()];
      const nodes = [...document.querySelectorAll("button, label, a[href]")];
      const node = nodes.find((each) => names(each).includes(wanted) && each.getClientRects().length);
      if (!node || node.disabled) return null;
      node.scrollIntoView({ block: "nearest" });
      const { left, top, width, height } = node.getBoundingClientRect();
      const place = [left + width / 2, top + height / 2];
      const hit = document.elementFromPoint(...place);
      return { place, cover: node.contains(hit) ? "" : String(hit?.outerHTML) };
    }, name);
    if (!found) throw new Error(`There is no enabled button "${name}"`);
    if (found.cover) throw new Error(`The button "${name}" is covered by ${found.cover}`);
    await this.pointer([[found.place]]);
  }

  /** Returns the text of the element with an id. */
  async text(id) {
    return this.evaluate((name) => document.getElementById(name).textContent, id);
  }

  /**
   * Checks, at the size of a phone and of a laptop, that elements and the whole page are inside of the window.
   *
   * @param ids of the elements.
   * @param screen begins the names of pictures of the screens, which are written if ONNXTRAIN_WEB_SCREENS names a folder.
   */
  async assertFits(ids, screen) {
    const folder = process.env.ONNXTRAIN_WEB_SCREENS;
    for (const [width, height] of [
      [Math.max(390, this.narrowest), 844],
      [1366, 768],
    ]) {
      await this.resize(width, height);
      const picture = await this.screenshot();
      assert.equal(picture.subarray(1, 4).toString(), "PNG");
      if (folder) {
        mkdirSync(folder, { recursive: true });
        writeFileSync(join(folder, `${screen}-${width}x${height}.png`), picture);
      }
      const outside = await this.evaluate((names) => {
        const { scrollWidth, scrollHeight } = document.documentElement;
        const beyond = names.filter((id) => {
          const box = document.getElementById(id).getBoundingClientRect();
          return box.left < 0 || box.top < 0 || box.right > innerWidth + 0.5 || box.bottom > innerHeight + 0.5;
        });
        return [...beyond, ...(scrollWidth > innerWidth || scrollHeight > innerHeight ? ["page"] : [])];
      }, ids);
      assert.deepEqual(outside, [], `outside of ${width} x ${height}`);
    }
  }

  /** Draws strokes, lists of points in a unit square, on the element with an id. */
  async draw(id, strokes) {
    const [left, top, width, height] = await this.evaluate((name) => {
      const node = document.getElementById(name);
      node.scrollIntoView({ block: "nearest" });
      const box = node.getBoundingClientRect();
      return [box.left, box.top, box.width, box.height];
    }, id);
    await this.pointer(strokes.map((stroke) => stroke.map(([x, y]) => [left + x * width, top + y * height])));
  }
}

/** A tab of Chromium. */
class PlaywrightTab extends Tab {
  constructor(page) {
    super();
    this.page = page;
  }

  async goto(url) {
    await this.page.goto(url);
  }

  async reload() {
    await this.page.reload();
  }

  async evaluate(run, argument) {
    return this.page.evaluate(run, argument);
  }

  /** Presses the mouse at the first point of each stroke, and lets go at its last. */
  async pointer(strokes) {
    const { mouse } = this.page;
    for (const stroke of strokes) {
      for (const [i, [x, y]] of stroke.entries()) {
        await mouse.move(x, y);
        if (i === 0) await mouse.down();
      }
      await mouse.up();
    }
  }

  async resize(width, height) {
    await this.page.setViewportSize({ width, height });
  }

  async screenshot() {
    return this.page.screenshot();
  }

  async choose(input, ...paths) {
    await this.page.locator(input).setInputFiles(paths);
  }

  async download(name, folder) {
    const waiting = this.page.waitForEvent("download");
    await this.click(name);
    const download = await waiting;
    const path = join(folder, download.suggestedFilename());
    await download.saveAs(path);
    return path;
  }

  /** Kills the process of the tab, and returns another tab. */
  async crash() {
    const context = this.page.context();
    const cdp = await context.newCDPSession(this.page);
    const crashed = this.page.waitForEvent("crash");
    cdp.send("Page.crash").catch(() => {});
    await crashed;
    await this.page.close();
    return new PlaywrightTab(await context.newPage());
  }
}

/** A tab of a browser with WebDriver. */
class WebDriverTab extends Tab {
  constructor(session, handle) {
    super();
    this.session = session;
    this.handle = handle;
    this.narrowest = session.constructor.NARROWEST ?? 0;
  }

  /** Runs a command in this tab. */
  async #command(...command) {
    return this.session.inTab(this.handle, ...command);
  }

  async goto(url) {
    await this.#command("navigate", { url });
  }

  async reload() {
    // Not by the command that refreshes: in Firefox it goes past the service worker.
    const url = await this.evaluate(() => location.href);
    await this.goto("about:blank");
    await this.goto(url);
  }

  async evaluate(run, argument) {
    // By the page's own `eval`: the realm in which Firefox runs the scripts of tests has no `import()`.
    const script = `
      const [code, argument, done] = arguments;
      new Promise((resolve) => resolve(window.eval(code)(argument === null ? undefined : JSON.parse(argument)))).then(
        (value) => done(JSON.stringify({ value })),
        (error) => done(JSON.stringify({ error: String(error) + "\\n" + (error && error.stack) })),
      );`;
    const args = [`(${run})`, argument === undefined ? null : JSON.stringify(argument)];
    const { value, error } = JSON.parse(await this.#command("executeAsync", { script, args }));
    if (error) throw new Error(error);
    return value;
  }

  async pointer(strokes) {
    const move = ([x, y]) => ({ type: "pointerMove", x: Math.round(x), y: Math.round(y), duration: 0 });
    const actions = strokes.flatMap(([first, ...others]) => [
      move(first),
      { type: "pointerDown", button: 0 },
      ...others.map(move),
      { type: "pointerUp", button: 0 },
    ]);
    const mouse = { type: "pointer", id: "mouse", parameters: { pointerType: "mouse" }, actions };
    await this.#command("actions", { actions: [mouse] });
  }

  async resize(width, height) {
    await this.session.resize(this, width, height);
  }

  async screenshot() {
    return Buffer.from(await this.#command("screenshot", {}), "base64");
  }

  async choose(input, ...paths) {
    const found = await this.#command("find", { using: "css selector", value: input });
    await this.#command("sendKeys", { element: Object.values(found)[0], text: paths.join("\n") });
  }

  async download(name, folder) {
    const before = readdirSync(this.session.downloads);
    await this.click(name);
    const fresh = () =>
      readdirSync(this.session.downloads).find(
        (file) =>
          !before.includes(file) &&
          !/\.(part|wkdownload)$/.test(file) &&
          !existsSync(join(this.session.downloads, `${file}.part`)),
      );
    const file = await until(`the file of "${name}"`, fresh, 20_000);
    const path = join(folder, file);
    // The browser may still be writing.
    let size = -1;
    for (let bytes; size !== (bytes = readFileSync(join(this.session.downloads, file))).length; await pause(200)) {
      size = bytes.length;
      writeFileSync(path, bytes);
    }
    rmSync(join(this.session.downloads, file));
    return path;
  }

  async crash() {
    return this.session.crash(this);
  }
}

/** What the two browsers with WebDriver share: `send` runs a command, and only one at a time. */
class Session {
  #last = Promise.resolve();
  #current;

  constructor(profile) {
    this.profile = profile;
    this.downloads = mkdtempSync(join(profile, "downloads-"));
  }

  /** Runs a job after those before. */
  #inTurn(job) {
    const result = this.#last.then(job);
    this.#last = result.catch(() => {});
    return result;
  }

  async inTab(handle, name, parameters) {
    return this.#inTurn(async () => {
      if (this.#current !== handle) await this.send("switch", { handle });
      this.#current = handle;
      return this.send(name, parameters);
    });
  }

  async newTab() {
    return this.#inTurn(async () => {
      const { handle } = await this.send("newWindow", { type: this.constructor.KIND });
      return new WebDriverTab(this, handle);
    });
  }

  /** Forgets which tab the commands go to, e.g. after a crash. */
  forget() {
    this.#current = undefined;
  }
}

const TIMEOUTS = { script: LONG, pageLoad: LONG, implicit: 0 };

/** Firefox, over its Marionette socket. */
class Firefox extends Session {
  static KIND = "tab";
  static COMMANDS = {
    navigate: "WebDriver:Navigate",
    executeAsync: "WebDriver:ExecuteAsyncScript",
    actions: "WebDriver:PerformActions",
    screenshot: "WebDriver:TakeScreenshot",
    find: "WebDriver:FindElement",
    sendKeys: "WebDriver:ElementSendKeys",
    switch: "WebDriver:SwitchToWindow",
    newWindow: "WebDriver:NewWindow",
  };
  #waiting = new Map();
  #messages = 0;

  /** Starts Firefox on a profile, which may have been used before. */
  async start(preferences) {
    const lines = Object.entries({
      "marionette.port": 0,
      "browser.shell.checkDefaultBrowser": false,
      "browser.startup.page": 0,
      "browser.startup.homepage_override.mstone": "ignore",
      "browser.sessionstore.resume_from_crash": false,
      "browser.tabs.warnOnClose": false,
      "browser.download.folderList": 2,
      "browser.download.dir": this.downloads,
      "browser.download.always_ask_before_handling_new_types": false,
      "browser.download.alwaysOpenPanel": false,
      "datareporting.policy.dataSubmissionEnabled": false,
      "toolkit.telemetry.reportingpolicy.firstRun": false,
      "app.normandy.enabled": false,
      "app.update.auto": false,
      "extensions.update.enabled": false,
      "network.captive-portal-service.enabled": false,
      "network.connectivity-service.enabled": false,
      "services.settings.server": "data:,",
      "toolkit.cosmeticAnimations.enabled": false,
      ...preferences,
    }).map(([name, value]) => `user_pref(${JSON.stringify(name)}, ${JSON.stringify(value)});\n`);
    writeFileSync(join(this.profile, "user.js"), lines.join(""));
    const active = join(this.profile, "MarionetteActivePort");
    rmSync(active, { force: true });
    const flags = ["--headless", "--marionette", "--remote-allow-system-access", "--no-remote", "--profile"];
    this.process = spawn(FIREFOX, [...flags, this.profile], {
      stdio: "ignore",
      env: { ...process.env, MOZ_CRASHREPORTER_DISABLE: "1" },
    });
    const port = await until("Firefox's port", () => existsSync(active) && Number(readFileSync(active, "utf8")));
    this.socket = connect(port, "127.0.0.1");
    await this.#listen();
    await this.#call("WebDriver:NewSession", { capabilities: { alwaysMatch: { timeouts: TIMEOUTS } } });
    this.forget();
    const handles = await this.#call("WebDriver:GetWindowHandles", {});
    return new WebDriverTab(this, handles[0]);
  }

  /** Messages are JSON behind their length and a colon; the first one greets. */
  #listen() {
    let bytes = Buffer.alloc(0);
    const fail = (error) => {
      for (const { reject } of this.#waiting.values()) reject(error);
      this.#waiting.clear();
    };
    return new Promise((greeted, refused) => {
      this.socket.on("error", (error) => (refused(error), fail(error)));
      this.socket.on("close", () => fail(new Error("Firefox has closed the connection")));
      this.socket.on("data", (data) => {
        bytes = Buffer.concat([bytes, data]);
        for (let colon; (colon = bytes.indexOf(":")) >= 0;) {
          const stop = colon + 1 + Number(bytes.subarray(0, colon));
          if (bytes.length < stop) return;
          const message = JSON.parse(bytes.subarray(colon + 1, stop));
          bytes = bytes.subarray(stop);
          if (!Array.isArray(message)) greeted();
          else {
            const [, id, error, result] = message;
            const { resolve, reject } = this.#waiting.get(id);
            this.#waiting.delete(id);
            if (error) reject(new Error(`${error.error}: ${error.message}`));
            else resolve(result?.value !== undefined && Object.keys(result).length === 1 ? result.value : result);
          }
        }
      });
    });
  }

  #call(command, parameters) {
    const id = ++this.#messages;
    const message = Buffer.from(JSON.stringify([0, id, command, parameters]));
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.socket.write(`${message.length}:${message}`);
    });
  }

  async send(name, { element, ...parameters }) {
    return this.#call(Firefox.COMMANDS[name], {
      ...parameters,
      ...(element && { id: element }),
      ...(name === "screenshot" && { full: false }),
    });
  }

  /** Sizes the content as DevTools do it: windows of Firefox are at least 450 pixels wide. */
  async resize(tab, width, height) {
    await tab.evaluate(() => null);
    await this.#call("Marionette:SetContext", { value: "chrome" });
    try {
      const script = `
        const { style } = gBrowser.selectedBrowser;
        for (const bound of ["min", "max"]) {
          style.setProperty(bound + "-width", arguments[0] + "px");
          style.setProperty(bound + "-height", arguments[1] + "px");
        }`;
      await this.#call("WebDriver:ExecuteScript", { script, args: [width, height] });
    } finally {
      await this.#call("Marionette:SetContext", { value: "content" });
    }
    await tab.waitFor(([w, h]) => innerWidth === w && innerHeight === h, [width, height], 10_000);
  }

  /** Kills the processes of all tabs. */
  async crash() {
    const tabs = descendants(this.process.pid).filter(([, command]) => /-contentproc.* tab$/.test(command));
    if (!tabs.length) throw new Error("Firefox has no process of a tab");
    tabs.forEach(([pid]) => kill(pid));
    this.forget();
    return this.newTab();
  }

  async close() {
    await end(this.process);
    this.socket.destroy();
  }
}

/** WebKitGTK's MiniBrowser, over HTTP by WebKitWebDriver. Its sessions keep nothing on disk, like a private window. */
class WebKit extends Session {
  // Commands to a tab in the background would not reach it.
  static KIND = "window";
  // The tools of MiniBrowser take 447 pixels.
  static NARROWEST = 450;
  static COMMANDS = {
    navigate: ["POST", "url"],
    executeAsync: ["POST", "execute/async"],
    actions: ["POST", "actions"],
    screenshot: ["GET", "screenshot"],
    find: ["POST", "element"],
    switch: ["POST", "window"],
    newWindow: ["POST", "window/new"],
    rect: ["POST", "window/rect"],
  };

  async start({ features } = {}) {
    const env = { ...process.env, GDK_BACKEND: "x11", NO_AT_BRIDGE: "1", HOME: this.profile };
    const settings = join(this.profile, ".config");
    mkdirSync(settings, { recursive: true });
    writeFileSync(join(settings, "user-dirs.dirs"), `XDG_DOWNLOAD_DIR="${this.downloads}"\n`);
    delete env.XDG_CONFIG_HOME;
    if (!env.DISPLAY) {
      // The server chooses a free display, and tells which.
      this.display = spawn(XVFB, ["-displayfd", "3", "-screen", "0", "1600x1200x24", "-nolisten", "tcp"], {
        stdio: ["ignore", "ignore", "ignore", "pipe"],
      });
      const number = await new Promise((resolve) => this.display.stdio[3].once("data", resolve));
      env.DISPLAY = `:${String(number).trim()}`;
    }
    const port = await new Promise((resolve) => {
      const probe = createServer().listen(0, "127.0.0.1", () => {
        const { port } = probe.address();
        probe.close(() => resolve(port));
      });
    });
    this.process = spawn(WEBKIT_DRIVER, [`--port=${port}`], { stdio: "ignore", env });
    this.url = `http://127.0.0.1:${port}/session`;
    await until("WebKitWebDriver", () =>
      fetch(`http://127.0.0.1:${port}/status`).then(
        () => true,
        () => false,
      ),
    );
    const args = ["--automation", ...(features ? [`--features=${features}`] : [])];
    const { sessionId } = await this.#call("POST", "", {
      capabilities: {
        alwaysMatch: { timeouts: TIMEOUTS, "webkitgtk:browserOptions": { binary: MINI_BROWSER, args } },
      },
    });
    this.url += `/${sessionId}`;
    // Large enough for the page below the bar in which MiniBrowser lists downloads.
    await this.send("rect", { width: 1500, height: 1150 });
    return new WebDriverTab(this, await this.#call("GET", "/window"));
  }

  async #call(method, path, body) {
    const request = {
      method,
      ...(method === "POST" && { body: JSON.stringify(body) }),
      signal: AbortSignal.timeout(2 * LONG),
    };
    const response = await fetch(this.url + path, request);
    const { value } = await response.json();
    if (!response.ok) throw new Error(`${path}: ${value.error}: ${value.message}`);
    return value;
  }

  async send(name, { element, ...parameters }) {
    if (name === "sendKeys") return this.#call("POST", `/element/${element}/value`, parameters);
    const [method, path] = WebKit.COMMANDS[name];
    return this.#call(method, `/${path}`, parameters);
  }

  async resize(tab, width, height) {
    for (let i = 0; i < 2; i++) {
      const [w, h, outer, high] = await tab.evaluate(() => [innerWidth, innerHeight, outerWidth, outerHeight]);
      if (w === width && h === height) return;
      await this.inTab(tab.handle, "rect", { width: outer + width - w, height: high + height - h });
      await pause(300);
    }
    await tab.waitFor(([w, h]) => innerWidth === w && innerHeight === h, [width, height], 10_000);
  }

  /** Leaves the page in whatever it does: the driver would end with the process of any of its tabs. */
  async crash(tab) {
    await tab.goto("about:blank");
    return tab;
  }

  async close() {
    await end(this.process);
    if (this.display) await end(this.display);
  }
}

const classes = { firefox: Firefox, webkit: WebKit };

/** Starts Firefox or WebKit with an empty profile: {tab, newTab, restart, close}. */
async function startWebDriver(name, options = {}) {
  const profile = mkdtempSync(join(tmpdir(), `onnxtrain-${name}-`));
  let session = new classes[name](profile);
  const tab = await session.start(options);
  return {
    tab,
    newTab: () => session.newTab(),
    /** Kills the browser, starts it on the same profile, and returns its tab. */
    async restart() {
      await session.close();
      session = new classes[name](profile);
      return session.start(options);
    },
    async close() {
      await session.close();
      rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
    },
  };
}

/** Starts Chromium in the same form. */
async function startChromium(options = {}) {
  const { context, close } = await startBrowser(options);
  return {
    tab: new PlaywrightTab(context.pages()[0] ?? (await context.newPage())),
    newTab: async () => new PlaywrightTab(await context.newPage()),
    close,
  };
}

const without = (name, packages) => `${name} is not tested, as it is missing: on Debian, apt-get install ${packages}`;

const all = {
  Chromium: { start: startChromium, missing: !CHROMIUM && without("Chromium", "chromium") },
  Firefox: {
    start: (options) => startWebDriver("firefox", options),
    missing: !FIREFOX && without("Firefox", "firefox-esr"),
  },
  WebKit: {
    start: (options) => startWebDriver("webkit", options),
    missing:
      !(WEBKIT_DRIVER && MINI_BROWSER && (process.env.DISPLAY || XVFB)) && without("WebKit", "webkit2gtk-driver xvfb"),
  },
};

/** Per browser, how to start it, and why it is not tested. ONNXTRAIN_WEB_BROWSER=Firefox leaves out the others. */
export const BROWSERS = Object.fromEntries(
  Object.entries(all).filter(([name]) => [name, "", undefined].includes(process.env.ONNXTRAIN_WEB_BROWSER)),
);

// As a program it says which browsers are missing.
if (process.argv[1] === fileURLToPath(import.meta.url))
  for (const { missing } of Object.values(BROWSERS)) if (missing) console.log(`${missing}.`);
