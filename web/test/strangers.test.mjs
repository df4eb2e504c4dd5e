/** Files that a stranger has made: nothing outside of their folder is read, and every load ends, with an error that says why. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import fsPromises from "node:fs/promises";
import {
  cpSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { createServer } from "node:http";
import { syncBuiltinESMExports } from "node:module";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";
import { pathToFileURL } from "node:url";
import { CheckpointError, ModelLoadError, TrainingSession } from "../dist/index.js";
import { embed, textField } from "../dist/wire.js";
import { serve } from "../demo/serve.mjs";
import { artifactsOf, folderOf, loadRuntime, prepare, read } from "./support.mjs";

const SECRET = "the victim's secret";
const LIMIT = { timeout: 60_000 };
let ort, root, stranger, server, site;
const requested = [];

// Every file whose content is read through Node's promises, as the package does it.
const opened = [];
for (const name of ["readFile", "open"]) {
  const original = fsPromises[name];
  fsPromises[name] = (path, ...more) => {
    opened.push(String(path));
    return original(path, ...more);
  };
}
syncBuiltinESMExports();

/** Names, sizes and times of everything around the stranger's folder. */
function surroundings(path = root) {
  return readdirSync(path, { withFileTypes: true })
    .filter((entry) => join(path, entry.name) !== stranger)
    .flatMap((entry) => {
      const { size, mtimeMs, mode } = lstatSync(join(path, entry.name));
      const here = `${path}/${entry.name} ${size} ${mtimeMs} ${mode}`;
      return entry.isDirectory() ? [here, ...surroundings(join(path, entry.name))] : [here];
    });
}

before(
  async () => {
    prepare();
    ort = await loadRuntime("node");
    root = mkdtempSync(join(tmpdir(), "strangers-"));
    stranger = join(root, "stranger");
    writeFileSync(join(root, "secret.txt"), SECRET);
    mkdirSync(join(root, "other"));
    writeFileSync(join(root, "other", "secret.txt"), SECRET);
    // A server that decodes more than it should, as some do, and notes what it is asked for.
    server = createServer((request, response) => {
      requested.push(request.url);
      try {
        response.end(readFileSync(join(root, decodeURIComponent(decodeURIComponent(request.url.split("?")[0])))));
      } catch {
        response.writeHead(404).end();
      }
    });
    await new Promise((done) => server.listen(0, "127.0.0.1", done));
    site = `http://127.0.0.1:${server.address().port}`;
  },
  { timeout: 300_000 },
);
after(() => {
  server?.close();
  rmSync(root, { recursive: true, force: true });
});

/** Copies a net into the stranger's folder, and lets `change` edit its manifest. */
function folder(net, change = () => {}) {
  rmSync(stranger, { recursive: true, force: true });
  cpSync(folderOf(net), stranger, { recursive: true });
  const manifest = JSON.parse(
    read(net, "manifest.json").length && readFileSync(join(stranger, "manifest.json"), "utf8"),
  );
  change(manifest);
  writeFileSync(join(stranger, "manifest.json"), JSON.stringify(manifest));
}

/** Opens the stranger's folder and checks that it fails, by which the message is returned. */
async function refused(artifacts, kind = ModelLoadError) {
  let message;
  const around = surroundings();
  opened.length = 0;
  await assert.rejects(TrainingSession.create(ort, { artifacts, warmUp: false }), (error) => {
    assert.ok(error instanceof kind, String(error.stack));
    ({ message } = error);
    for (const text of [message, error.cause?.message ?? "", String(error.cause?.stack ?? "").split("\n")[0]]) {
      assert.ok(!text.includes(SECRET));
      assert.doesNotMatch(text, /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/u);
    }
    return true;
  });
  const inside = realpathSync(stranger);
  for (const path of opened) assert.ok(path.startsWith(inside), path);
  assert.deepEqual(surroundings(), around);
  return message;
}

const OUTSIDE = [
  "../secret.txt",
  "..",
  ".",
  "",
  "a/../../secret.txt",
  "./../secret.txt",
  "/secret.txt",
  "//127.0.0.1/secret.txt",
  "///secret.txt",
  "..\\secret.txt",
  "\\secret.txt",
  "C:\\secret.txt",
  "C:secret.txt",
  "%2e%2e/secret.txt",
  "%2E%2e%2fsecret.txt",
  ".%2e/secret.txt",
  "..%2fsecret.txt",
  "..%5csecret.txt",
  "%252e%252e/secret.txt",
  "other/%2e%2e/%2e%2e/secret.txt",
  "file:///etc/hostname",
  "http://127.0.0.1/secret.txt",
  "https:secret.txt",
  "data:text/plain,x",
  "blob:null/x",
  "checkpoint/",
  "checkpoint//x",
  ".. /secret.txt",
  ".../secret.txt",
  "checkpoint\0.txt",
  "\u001b[2J../secret.txt",
  "\t../secret.txt",
  "*/_ORT_MEM_ADDR_/*",
];

describe("names", () => {
  const roles = ["training_model", "eval_model", "inference_model", "optimizer_model", "checkpoint"];
  it("of the manifest lead to no other file, in Node and over http", LIMIT, async () => {
    let count = 0;
    for (const [index, name] of OUTSIDE.entries()) {
      folder("mlp", ({ files }) => (files[roles[index % roles.length]] = name));
      for (const artifacts of [pathToFileURL(stranger), `${site}/stranger/`, `${site}/stranger/manifest.json`]) {
        requested.length = 0;
        assert.match(await refused(artifacts), /is no file/);
        for (const url of requested) assert.match(url, /^\/stranger\/[a-z_.]+$/);
        count += 1;
      }
    }
    assert.equal(count, 3 * OUTSIDE.length);
  });
  it("with signs that URLs give a meaning are names", LIMIT, async () => {
    for (const name of ["check?point", "check#point", "check point", "100%", "ünï", "a&b=c", "..x", "x.."]) {
      folder("mlp", ({ files }) => (files.checkpoint = name));
      cpSync(join(folderOf("mlp"), "checkpoint"), join(stranger, name));
      const session = await TrainingSession.create(ort, { artifacts: pathToFileURL(stranger), warmUp: false });
      session.release();
    }
  });

  // Wherever a model keeps a tensor, its data may be in a file; protobuf appends these fields to the model.
  const tensor = (location) => [
    embed(13, textField(1, "location"), textField(2, location)),
    embed(13, textField(1, "offset"), textField(2, "0")),
    textField(8, "w"),
  ];
  const node = (location, attribute) => embed(1, embed(5, embed(attribute, ...tensor(location))));
  const places = {
    initializer: (l) => embed(7, embed(5, ...tensor(l))),
    "values of a sparse initializer": (l) => embed(7, embed(15, embed(1, ...tensor(l)))),
    "indices of a sparse initializer": (l) => embed(7, embed(15, embed(2, ...tensor(l)))),
    "constant of a node": (l) => embed(7, node(l, 5)),
    "constants of a node": (l) => embed(7, node(l, 10)),
    "sparse constant": (l) => embed(7, embed(1, embed(5, embed(22, embed(1, ...tensor(l)))))),
    "sparse constants": (l) => embed(7, embed(1, embed(5, embed(23, embed(2, ...tensor(l)))))),
    subgraph: (l) => embed(7, embed(1, embed(5, embed(6, embed(5, ...tensor(l)))))),
    "one of several subgraphs": (l) => embed(7, embed(1, embed(5, embed(11, embed(5, ...tensor(l)))))),
    "subgraph of a subgraph": (l) => embed(7, embed(1, embed(5, embed(6, embed(1, embed(5, embed(6, node(l, 5)))))))),
    function: (l) => embed(25, embed(7, embed(5, embed(5, ...tensor(l))))),
    "attribute of a function": (l) => embed(25, embed(11, embed(5, ...tensor(l)))),
    "initialization of training": (l) => embed(20, embed(1, embed(5, ...tensor(l)))),
    "algorithm of training": (l) => embed(20, embed(2, embed(5, ...tensor(l)))),
  };
  for (const [place, make] of Object.entries(places)) {
    it(`of external data lead to no other file: ${place}`, LIMIT, async () => {
      const names = ["../secret.txt", join(root, "secret.txt"), "%2e%2e/secret.txt", "*/_ORT_MEM_ADDR_/*"];
      for (const location of names) {
        folder("mlp");
        const path = join(stranger, "training_model.onnx");
        writeFileSync(path, Buffer.concat([readFileSync(path), make(location)]));
        for (const artifacts of [
          pathToFileURL(stranger),
          `${site}/stranger/`,
          {
            ...artifactsOf("mlp"),
            "training_model.onnx": new Uint8Array(readFileSync(path)),
            [location]: Buffer.from(SECRET),
          },
        ]) {
          requested.length = 0;
          assert.match(await refused(artifacts), /is no file/);
          for (const url of requested) assert.match(url, /^\/stranger\/[a-z_.]+$/);
        }
      }
    });
  }
  it("of weights in a file of their own, in the folder and below it, are read", LIMIT, async () => {
    const files = artifactsOf("shared");
    const name = Object.keys(files).find((file) => file.endsWith(".data"));
    assert.ok(name);
    folder("shared");
    const session = await TrainingSession.create(ort, { artifacts: `${site}/stranger/`, warmUp: false });
    session.release();
  });
  it("a graph inside of a thousand others is refused", LIMIT, async () => {
    let graph = embed(5, ...tensor("../secret.txt"));
    for (let i = 0; i < 1000; i++) graph = embed(1, embed(5, embed(6, graph)));
    const model = Buffer.concat([read("mlp", "training_model.onnx"), embed(7, graph)]);
    assert.match(await refused({ ...artifactsOf("mlp"), "training_model.onnx": new Uint8Array(model) }), /nested/);
  });
});

describe("the folder", { skip: process.platform === "win32" }, () => {
  for (const name of ["manifest.json", "training_model.onnx", "checkpoint"]) {
    it(`${name} is no link that leads out of it`, LIMIT, async () => {
      folder("mlp");
      const path = join(stranger, name);
      cpSync(path, join(root, "other", name));
      for (const target of [join(root, "other", name), join("..", "other", name), "/dev/zero"]) {
        rmSync(path);
        symlinkSync(target, path);
        assert.match(await refused(pathToFileURL(stranger)), /link to a file outside/);
      }
    });
  }
  it("a pipe is no file, and is not waited for", LIMIT, async () => {
    folder("mlp");
    rmSync(join(stranger, "checkpoint"));
    execFileSync("mkfifo", [join(stranger, "checkpoint")]);
    assert.match(await refused(pathToFileURL(stranger)), /no ordinary file/);
  });
  it("links within it, and a link to it, are the user's own", LIMIT, async () => {
    folder("mlp");
    mkdirSync(join(stranger, "below"));
    cpSync(join(stranger, "checkpoint"), join(stranger, "below", "kept"));
    rmSync(join(stranger, "checkpoint"));
    symlinkSync(join("below", "kept"), join(stranger, "checkpoint"));
    symlinkSync(stranger, join(root, "link"));
    const session = await TrainingSession.create(ort, { artifacts: pathToFileURL(join(root, "link")), warmUp: false });
    session.release();
  });
});

/** A safetensors file with this header and so many bytes of data. */
function safetensors(header, size = 0) {
  const text = Buffer.from(typeof header === "string" ? header : JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return new Uint8Array(Buffer.concat([length, text, Buffer.alloc(size)]));
}

describe("sizes", () => {
  const checkpoints = {
    "a header longer than the file": new Uint8Array([255, 255, 255, 5, 0, 0, 0, 0, 123, 125]),
    "a header of 2^63 bytes": new Uint8Array([0, 0, 0, 0, 0, 0, 0, 128, 123, 125]),
    "a tensor of 2^53 elements": safetensors(
      { "parameter/w": { dtype: "F32", shape: [2 ** 53], data_offsets: [0, 4] } },
      4,
    ),
    "a tensor of 2^106 elements": safetensors(
      { "parameter/w": { dtype: "F32", shape: [2 ** 52, 2 ** 52, 4], data_offsets: [0, 4] } },
      4,
    ),
    // Copies of all of them would take 2 TB.
    "20,000 tensors in the same 100 MB": safetensors(
      Object.fromEntries(
        Array.from({ length: 20_000 }, (_, i) => [
          `parameter/${i}`,
          { dtype: "U8", shape: [1e8], data_offsets: [0, 1e8] },
        ]),
      ),
      1e8,
    ),
    "an object inside of 10^6 others": safetensors('{"a":'.repeat(1e6)),
    "a list inside of 10^6 others": safetensors('{"a":' + "[".repeat(1e6)),
    "a name of 20 MB": safetensors(`{"${"x".repeat(2e7)}": 3}`),
    "a key twice": safetensors('{"a": {}, "a": {}}'),
    "the prototype as a key": safetensors('{"__proto__": {"polluted": true}, "constructor": {"polluted": true}}'),
    "the prototype in the metadata": safetensors(
      '{"__metadata__": {"__proto__": "x", "format": "onnxtrain-checkpoint"}}',
    ),
  };
  for (const [what, checkpoint] of Object.entries(checkpoints)) {
    it(`of a checkpoint: ${what}`, LIMIT, async () => {
      const before = process.memoryUsage().rss;
      await refused({ ...artifactsOf("mlp"), checkpoint }, CheckpointError);
      assert.ok(process.memoryUsage().rss - before < 2 ** 30);
      assert.equal({}.polluted, undefined);
      assert.equal(Object.polluted, undefined);
    });
  }

  it("of an input are no reason to allocate it", LIMIT, async () => {
    const web = await loadRuntime("wasm");
    for (const size of [2 ** 53 - 1, 2 ** 40, 2 ** 31]) {
      folder("mlp", ({ inputs }) => (inputs[0].shape = ["batch", size]));
      const before = process.memoryUsage().rss;
      // The warm-up on zeros is left out; the model itself says what it takes in the first step.
      const session = await TrainingSession.create(web, { artifacts: pathToFileURL(stranger) });
      assert.ok(process.memoryUsage().rss - before < 2 ** 30);
      session.release();
    }
    for (const size of [-1, 2 ** 53, 1.5]) {
      folder("mlp", ({ inputs }) => (inputs[0].shape = ["batch", size]));
      assert.match(await refused(pathToFileURL(stranger)), /no list of sizes/);
    }
  });
  it("of a parameter are those of the fingerprint and of the checkpoint", LIMIT, async () => {
    folder("mlp", ({ parameters }) => (parameters[0].shape = [2 ** 53 - 1]));
    assert.match(await refused(pathToFileURL(stranger)), /fingerprint/);
  });
  it("of moments are at most those of the parameters", LIMIT, async () => {
    const files = artifactsOf("mlp");
    const load = (session) => ({ ...ort, InferenceSession: { create: session }, Tensor: ort.Tensor });
    // A session whose optimizer declares a moment of 4 TB, as a model may.
    const huge = load(async (bytes, options) => {
      const session = await ort.InferenceSession.create(bytes, options);
      const inputMetadata = session.inputMetadata.map((input) =>
        /_momentum\d$/.test(input.name) ? { ...input, shape: [2 ** 40] } : input,
      );
      return new Proxy(session, {
        get: (target, name) =>
          name === "inputMetadata" ? inputMetadata : (target[name]?.bind?.(target) ?? target[name]),
      });
    });
    await assert.rejects(
      TrainingSession.create(huge, { artifacts: files, warmUp: false }),
      (error) => error instanceof ModelLoadError && /more elements than the parameter's/.test(error.message),
    );
  });
});

it("names do not reach a console as control characters", LIMIT, async () => {
  const name = "w\u001b[2J\u202e\u009b\n\u2028";
  folder("mlp", ({ inputs }) => (inputs[0].dtype = name));
  assert.ok((await refused(pathToFileURL(stranger))).includes("w\\u{1b}[2J\\u{202e}\\u{9b}\\u{a}\\u{2028}"));
  folder("mlp", ({ inputs }) => (inputs[0].dtype = "x".repeat(2 ** 20)));
  assert.ok((await refused(pathToFileURL(stranger))).length < 11_000);
});

describe("the demo's server", () => {
  it("serves files of its folder, and outlives everything else", LIMIT, async () => {
    const dist = join(root, "dist");
    mkdirSync(join(dist, "app.js"), { recursive: true });
    mkdirSync(join(dist, "page", "index.html"), { recursive: true });
    writeFileSync(join(dist, "index.html"), "<p>hello</p>");
    writeFileSync(join(dist, "large.bin"), Buffer.alloc(5e6));
    symlinkSync(join(root, "secret.txt"), join(dist, "link.txt"));
    if (process.platform !== "win32") execFileSync("mkfifo", [join(dist, "pipe")]);
    const { url, close } = await serve(0, dist);
    const port = Number(new URL(url).port);
    /** Sends bytes as they are, which fetch would tidy up; returns what comes back. */
    const send = (bytes, cut = false) =>
      new Promise((done) => {
        const socket = connect(port, "127.0.0.1", () => {
          socket.write(bytes);
          if (cut) setTimeout(() => (socket.destroy(), done("")), 20);
        });
        let answer = "";
        socket.on("data", (data) => (answer += data.toString("latin1")));
        socket.on("error", () => done(answer));
        socket.on("close", () => done(answer));
      });
    const get = (path, more = "") => send(`GET ${path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n${more}\r\n`);
    const absent = ["/app.js", "/page", "/page/", "/page/index.html", "/pipe", "/link.txt", "/none", "/index.html/x"];
    absent.push("/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "/..%5csecret.txt", "/%", "/%00", "/%ff");
    absent.push("//", "//x/y", "/a\\..\\..\\secret.txt", "http://[", "*", `/${"a".repeat(5000)}`);
    for (const path of absent) {
      const answer = await get(path);
      assert.match(answer, /^HTTP\/1\.1 4\d\d /, path);
      assert.ok(!answer.includes(SECRET), path);
    }
    assert.match(await get("/", `X: ${"a".repeat(1e5)}\r\n`), /^HTTP\/1\.1 431 /);
    assert.match(await send("nonsense\r\n\r\n"), /^HTTP\/1\.1 400 /);
    for (const bytes of [
      "GET /large.bin HTTP/1.1\r\nHost: x\r\n\r\n",
      "GET / HT",
      "POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
    ])
      await send(bytes, true);
    assert.equal(await (await fetch(url)).text(), "<p>hello</p>");
    const large = await fetch(`${url}large.bin`, { headers: { "accept-encoding": "identity" } });
    assert.equal((await large.arrayBuffer()).byteLength, 5e6);
    // Another machine cannot connect: the server listens on the loopback device only.
    await assert.rejects(
      new Promise((done, fail) => connect(port, "127.0.0.2").once("connect", done).once("error", fail)),
    );
    await close();
  });
});
