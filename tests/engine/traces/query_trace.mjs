// Loads a trace into Perfetto's trace processor (the WebAssembly of ui.perfetto.dev) and answers SQL:
//
//     node query_trace.mjs FOLDER TRACE SQL…    prints {"version": …, "results": [[row, …], …]}
//
// FOLDER has trace_processor.wasm, the glue that runs it in a worker of a browser (engine_bundle.node.js)
// and the decoder of its answers (engine.mjs). The glue is given what it takes from a browser.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);
const CHUNK = 2 ** 25; // a request has at most 64 MiB

async function startWorker() {
  globalThis.self = globalThis;
  globalThis.WorkerGlobalScope = Object;
  globalThis.location = { href: pathToFileURL(folder).href + "/" };
  globalThis.XMLHttpRequest = class {
    open() {}
    send() { this.response = readFileSync(join(folder, "trace_processor.wasm")); }
  };
  // The glue asks by a module of a few bytes whether memory of 64 bits works; only that of 32 bits is here.
  const { Module } = WebAssembly;
  WebAssembly.Module = class {
    constructor(bytes) {
      if (bytes.byteLength < 100) throw new Error("no memory of 64 bits");
      return new Module(bytes);
    }
  };
  vm.runInThisContext(readFileSync(join(folder, "engine_bundle.node.js"), "utf8"));
  WebAssembly.Module = Module;
  await pause(0); // the glue makes its buffers in a microtask
  const { port1, port2 } = new MessageChannel();
  self.onmessage({ data: port1 });
  return port2;
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

function connect(Base, port) {
  class Engine extends Base {
    id = "trace";
    mode = "WASM";
    rpcSendRequestBytes(bytes) { port.postMessage(bytes); }
  }
  const engine = new Engine();
  port.onmessage = ({ data }) => engine.onRpcResponseBytes(data);
  return engine;
}

function rowsOf(result) {
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(result.columns().map((name) => row.get(name)));
  }
  return rows;
}

console.warn = () => {}; // the decoder is older than the processor, and names what it does not know
const { EngineBase } = await import(pathToFileURL(join(folder, "engine.mjs")).href);
const port = await startWorker();
const engine = connect(EngineBase, port);
const bytes = new Uint8Array(readFileSync(trace));
for (let at = 0; at < bytes.length; at += CHUNK) await engine.parse(bytes.subarray(at, at + CHUNK));
await engine.notifyEof();
const results = [];
for (const sql of queries) results.push(rowsOf(await engine.query(sql)));
console.log(JSON.stringify(results, (_, value) => (typeof value === "bigint" ? Number(value) : value)));
port.close();
process.exit(0);
