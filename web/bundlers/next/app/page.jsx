"use client";

import { useEffect, useState } from "react";

export default function Page() {
  const [page, setPage] = useState([]);
  const [worker, setWorker] = useState([]);
  useEffect(() => {
    let thread;
    const append = (set) => (text) => set((texts) => [...texts, text]);
    const timer = setTimeout(async () => {
      // Here, as ONNX Runtime for the web cannot be loaded on the server.
      const { train } = await import("../src/train.js");
      await train(1, append(setPage));
      thread = new Worker(new URL("../src/worker.js", import.meta.url), {
        type: "module",
      });
      thread.onmessage = ({ data }) => append(setWorker)(data);
      thread.onerror = ({ message }) => append(setWorker)(message);
    });
    return () => (clearTimeout(timer), thread?.terminate());
  }, []);
  return (
    <>
      <p id="page">Page: {page.join(" ")}</p>
      <p id="worker">Worker, {worker.join(" ")}</p>
    </>
  );
}
