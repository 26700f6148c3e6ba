// Requests to the server that this page came from, with the token of its address.
const token = new URLSearchParams(location.search).get("token") || "";

export class LabError extends Error {
  constructor(parts, status = 0) {
    super(parts.title || "The server did not answer.");
    this.parts = parts;
    this.status = status;
  }
}

const headers = () => ({ "X-Regard-Token": token });

async function send(path, body, signal) {
  const request = { method: body === null ? "GET" : "POST", headers: headers(), signal, cache: "no-store" };
  if (body instanceof FormData) request.body = body;
  else if (body !== null) {
    request.body = JSON.stringify(body);
    request.headers["Content-Type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(path, request);
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new LabError({ title: "The lab's server cannot be reached.", because: "it was stopped, or its address changed", instead: "start `regard lab` again and open the address that it prints" });
  }
  if (answer.ok) return answer;
  let parts = { title: `The server refused the request (${answer.status}).` };
  try {
    parts = (await answer.json()).error || parts;
  } catch { /* the answer is no JSON: the status says enough */ }
  throw new LabError(parts, answer.status);
}

export async function get(path, signal) {
  return (await send(path, null, signal)).json();
}

export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

// Answers that come line by line: `each` sees all lines but the last, whose result is returned.
export async function stream(path, body, { each = () => {}, signal } = {}) {
  const answer = await send(path, body, signal), reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", result;
  const take = (line) => {
    if (!line.trim()) return;
    const one = JSON.parse(line);
    if (one.error) throw new LabError(one.error);
    if ("result" in one) result = one.result;
    else each(one);
  };
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach(take);
  }
  take(rest);
  if (result === undefined) throw new LabError({ title: "The answer ended early.", because: "the server stopped the work", instead: "ask again" });
  return result;
}

// Runs one request of a kind at a time: a newer one ends the older, whose answer is dropped (undefined).
export function latest(work) {
  let stopper = null;
  const run = async (...given) => {
    if (stopper) stopper.abort();
    const own = new AbortController();
    stopper = own;
    try {
      const found = await work(own.signal, ...given);
      return own.signal.aborted ? undefined : found;
    } catch (failure) {
      if (failure.name === "AbortError" || own.signal.aborted) return undefined;
      throw failure;
    } finally {
      if (stopper === own) stopper = null;
    }
  };
  run.stop = () => stopper && stopper.abort();
  return run;
}
