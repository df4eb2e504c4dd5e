import { train } from "./train.js";

const show = (id) => (text) => document.getElementById(id).append(`${text} `);
await train(1, show("page")).catch(({ message }) => show("page")(message));

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
worker.onmessage = ({ data }) => show("worker")(data);
worker.onerror = ({ message }) =>
  show("worker")(message ?? "The worker's script didn't load.");
