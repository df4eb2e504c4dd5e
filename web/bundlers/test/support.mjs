/** Copies the projects out of the repository, installs, builds and serves them as their users do. */

import { execFileSync, spawn } from "node:child_process";
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const root = join(here, "..", "..", "..");
// Outside of the repository's folders with packages, so that nothing is found by chance in web/node_modules.
const work = process.env.ONNXTRAIN_BUNDLERS ?? join(root, "build", "bundlers");
const python = process.env.PYTHON ?? join(root, ".venv", "bin", "python");

export const BUNDLERS = ["vite", "webpack", "esbuild", "next"];

export function sourceOf(bundler) {
  return join(here, "..", bundler);
}

export function folderOf(bundler) {
  return join(work, bundler);
}

/** Runs a command of a project to its end and returns what it prints; fails with it. */
export function run(folder, command, ...args) {
  const options = { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"], env: environment() };
  try {
    return execFileSync(command, args, options);
  } catch (error) {
    throw new Error(`${command} ${args.join(" ")} failed:\n${error.stdout}\n${error.stderr}`, { cause: error });
  }
}

/** The environment of a user: without what a test runner sets. */
function environment() {
  const { NODE_OPTIONS: _, NODE_TEST_CONTEXT: __, ...others } = process.env;
  return { ...others, NEXT_TELEMETRY_DISABLED: "1", CI: "1" };
}

/** Makes artifacts and Python's losses once, and packs the package; returns the losses. */
export function prepare() {
  mkdirSync(work, { recursive: true });
  execFileSync(python, [join(here, "reference.py"), work], { stdio: ["ignore", "inherit", "inherit"] });
  execFileSync("npm", ["pack", join(root, "web"), "--pack-destination", work, "--silent"], { cwd: work });
  return JSON.parse(readFileSync(join(work, "losses.json"), "utf8"));
}

/** Copies a project with artifacts and package, and installs it. Packages of an earlier run stay. */
export function install(bundler) {
  const folder = folderOf(bundler);
  if (existsSync(folder)) {
    for (const name of readdirSync(folder))
      if (name !== "node_modules") rmSync(join(folder, name), { recursive: true });
    for (const name of [".package-lock.json", "onnxtrain-web", ".vite", ".cache"])
      rmSync(join(folder, "node_modules", name), { recursive: true, force: true });
  }
  const untracked = /[\\/](node_modules|dist|\.next|public[\\/](build|ort|artifacts))([\\/]|$)/;
  cpSync(sourceOf(bundler), folder, { recursive: true, filter: (path) => !untracked.test(path.slice(here.length)) });
  cpSync(join(work, "artifacts"), join(folder, "public", "artifacts"), { recursive: true });
  const [archive] = readdirSync(work).filter((name) => name.endsWith(".tgz"));
  cpSync(join(work, archive), join(folder, archive));
  run(folder, "npm", "install", "--no-audit", "--no-fund");
}

/** Returns a port that is free now. */
export function freePort() {
  return new Promise((resolve) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

/** Starts a server of a project, e.g. `npm run dev`, and waits until it answers; resolves to {url, close}. */
export async function start(folder, script, ...args) {
  const child = spawn("npm", ["run", script, "--", ...args], {
    cwd: folder,
    detached: true,
    stdio: ["ignore", "pipe", "pipe"],
    env: environment(),
  });
  let output = "";
  for (const stream of [child.stdout, child.stderr]) stream.on("data", (data) => (output += data));
  const ended = new Promise((resolve) => child.once("exit", resolve));
  const close = async () => {
    // npm, its shell and the server are one group.
    if (child.exitCode === null) process.kill(-child.pid, "SIGTERM");
    await ended;
  };
  const url = `http://localhost:${args.at(-1)}/`;
  for (let i = 0; i < 600; i++) {
    if (child.exitCode !== null) break;
    const answer = await fetch(url).catch(() => null);
    if (answer) return { url, close, output: () => output };
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  await close();
  throw new Error(`npm run ${script} ${args.join(" ")} did not start:\n${output}`);
}
