// A worker for Pawl: attaches, runs calls, reconnects, and drains on SIGTERM.
//
//   PAWL_ADDRESS   host:port of the registry; 127.0.0.1:7602 if not set
//   PAWL_API_KEY   key with the worker role; the key of `pawl up` is in .pawl/secrets/local-key
//   PAWL_PROTO     Pawl's folder proto/; default: the one in this repository
"use strict";

const crypto = require("node:crypto");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const proto = process.env.PAWL_PROTO || path.join(__dirname, "..", "..", "..", "proto");
const pawl = grpc.loadPackageDefinition(
  protoLoader.loadSync("pawl/tool/v1/worker.proto", {
    includeDirs: [proto],
    keepCase: true,
    enums: String,
    longs: String,
    oneofs: true,
  }),
).pawl;

// Each tool has a definition and a function that takes the arguments and the call.
const tools = {
  shout: {
    definition: {
      name: "shout",
      description: "Write a text in capital letters.",
      arguments_schema_json: Buffer.from(
        JSON.stringify({
          type: "object",
          properties: { text: { type: "string" } },
          required: ["text"],
          additionalProperties: false,
        }),
      ),
      context: "EXECUTION_CONTEXT_BACKEND",
      category: "TOOL_CATEGORY_SAFE",
      effect_class: "EFFECT_CLASS_READ_ONLY",
    },
    async run({ text }, call) {
      call.progress(0.5, "taking a deep breath");
      return { shouted: text.toUpperCase(), for: call.user_id };
    },
  },
};

const address = process.env.PAWL_ADDRESS || "127.0.0.1:7602";
const workerId = `w-${crypto.randomBytes(8).toString("hex")}`;
const client = new pawl.tool.v1.WorkerService(address, grpc.credentials.createInsecure());
const inHand = new Map(); // By call id: the call, how to stop it, and its result once there is one.
let stream = null;
let draining = false;
let failures = 0;

function attach() {
  const metadata = new grpc.Metadata();
  if (process.env.PAWL_API_KEY) metadata.set("authorization", `Bearer ${process.env.PAWL_API_KEY}`);
  const opened = client.AttachWorker(metadata);
  let heartbeat = null;
  opened.on("data", (response) => {
    if (response.frame === "welcome") {
      failures = 0;
      stream = opened;
      heartbeat = setInterval(() => opened.write({ heartbeat: {} }), response.welcome.heartbeat_seconds * 1000);
      for (const { result } of inHand.values()) if (result) opened.write({ result });
      if (draining) opened.write({ drain: {} });
      console.log("attached");
    } else if (response.frame === "invocation") {
      begin(response.invocation);
    } else if (response.frame === "cancel") {
      held(response.cancel)?.stop.abort();
    } else if (response.frame === "receipt") {
      if (held(response.receipt)) inHand.delete(response.receipt.call_id);
    }
  });
  opened.on("error", () => {}); // `status` says it too.
  opened.on("status", ({ code, details }) => {
    clearInterval(heartbeat);
    if (stream === opened) stream = null;
    if (draining && inHand.size === 0) return client.close();
    const passing = [grpc.status.OK, grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED];
    if (!passing.includes(code)) {
      console.error(`the registry does not want this worker: ${details}`);
      process.exitCode = 1;
      return client.close();
    }
    setTimeout(attach, Math.min(5000, 100 * 2 ** failures++) * (0.5 + Math.random() / 2));
  });
  opened.write({
    hello: {
      group_name: "node",
      worker_id: workerId,
      tools: Object.values(tools).map((tool) => tool.definition),
      calls_max: 8,
      held_calls: [...inHand.values()].map(({ call }) => ({ call_id: call.call_id, lease_epoch: call.lease_epoch })),
    },
  });
}

function held({ call_id, lease_epoch }) {
  const entry = inHand.get(call_id);
  return entry && entry.call.lease_epoch === lease_epoch ? entry : undefined;
}

async function begin(call) {
  const key = { call_id: call.call_id, lease_epoch: call.lease_epoch };
  const entry = { call, stop: new AbortController(), result: null };
  inHand.set(call.call_id, entry);
  call.signal = entry.stop.signal; // Aborted when the result is not wanted any more.
  call.progress = (fraction, message) => stream?.write({ progress: { ...key, fraction, message } });
  let outcome;
  try {
    const value = await tools[call.tool_name].run(JSON.parse(call.arguments_json), call);
    outcome = { content_json: Buffer.from(JSON.stringify(value ?? null)) };
  } catch (error) {
    console.error(`${call.tool_name}: ${error.stack}`);
    outcome = { error_message: `${call.tool_name} failed` }; // For the model: what it may know.
  }
  entry.result = { ...key, ...outcome };
  stream?.write({ result: entry.result }); // Without a stream it is sent after the reconnect.
}

for (const signal of ["SIGTERM", "SIGINT"]) {
  process.on(signal, () => {
    draining = true;
    stream?.write({ drain: {} });
    if (!stream && inHand.size === 0) process.exit(0);
  });
}

attach();
