// Perfetto's trace processor under node: its own protocol on stdin and stdout, and no network.
// The engine is the script of a browser's worker, so it gets a world of its own with the little that it asks for.
import { readFileSync, writeSync } from "node:fs";
import { dirname, join } from "node:path";
import { createContext, runInContext } from "node:vm";

const engine = process.argv[2];

class Request {
  open(_method, name) {
    this.response = new Uint8Array(readFileSync(join(dirname(engine), name))).buffer;
  }
  send() {}
}

const say = (...words) => process.stderr.write(`${words.join(" ")}\n`);
const world = {
  XMLHttpRequest: Request,
  WorkerGlobalScope: Request,
  location: { href: "" },
  console: { log: say, warn: say, error: say },
  ...{ performance, TextDecoder, URL, crypto, setTimeout, Uint8Array },
};
world.self = world;
runInContext(readFileSync(engine, "utf8"), createContext(world));
const port = {
  postMessage(bytes) {
    for (let done = 0; done < bytes.length; ) {
      done += writeSync(1, bytes, done);
    }
  },
};
world.onmessage({ data: port });
for await (const chunk of process.stdin) {
  port.onmessage({ data: new Uint8Array(chunk) });
}
