"use client";

import { useState } from "react";

export default function Page() {
  const [page, setPage] = useState("");
  const [worker, setWorker] = useState("");

  async function start() {
    // Here, as ONNX Runtime for the web cannot be imported on the server.
    const { train } = await import("../src/train.js");
    const showPage = (next) => setPage((text) => `${text} ${next}`);
    await train(1, showPage).catch(({ message }) => showPage(message));

    const show = (next) => setWorker((text) => `${text} ${next}`);
    const thread = new Worker(new URL("../src/worker.js", import.meta.url), {
      type: "module",
    });
    thread.onmessage = ({ data }) => show(data);
    thread.onerror = ({ message }) =>
      show(message ?? "The worker's script didn't load.");
  }

  return (
    <>
      <button onClick={start}>Train</button>
      <p id="page">Page: {page}</p>
      <p id="worker">Worker, {worker}</p>
    </>
  );
}
