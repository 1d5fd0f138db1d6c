import { bars, lines, short, WINDOW_SECONDS } from "./plot.js";
import { events, HttpError } from "./stream.js";

const get = (id) => document.getElementById(id);
const reduced = matchMedia("(prefers-reduced-motion: reduce)");
const EXPERT_SECONDS = 10;

let key = "";
const authorization = () => (key ? { authorization: `Bearer ${key}` } : {});

function say(id, text, isError = false) {
  if (get(id).textContent !== text) get(id).textContent = text; // A screen reader reads each change.
  get(id).classList.toggle("error", isError);
}

function askForKey() {
  get("key-form").hidden = false;
  get("key").focus();
}

// The completion.

let generating = null;

async function generate() {
  const controller = new AbortController();
  generating = controller;
  const output = get("output");
  output.replaceChildren();
  output.ariaBusy = "true"; // A screen reader reads the answer once it is whole.
  get("stop").disabled = false;
  if (document.activeElement === get("generate")) get("stop").focus();
  get("generate").disabled = true;
  say("status", "Generating");
  const start = performance.now();
  let usage = null, reason = null;
  try {
    const body = {
      prompt: get("prompt").value,
      max_tokens: get("max-tokens").valueAsNumber,
      temperature: get("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    };
    const headers = { "content-type": "application/json", ...authorization() };
    const request = { method: "POST", headers, body: JSON.stringify(body), signal: controller.signal };
    for await (const data of events("/v1/completions", request)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0]; // The chunk with the usage has none.
      usage = chunk.usage ?? usage;
      reason = choice?.finish_reason ?? reason;
      const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
      if (choice?.text) output.append(choice.text);
      if (atEnd) output.scrollTop = output.scrollHeight;
    }
    if (!usage) throw new Error("the connection closed before the end");
    const seconds = (performance.now() - start) / 1000;
    const speed = short(usage.completion_tokens / seconds);
    const end = reason === "stop" ? "the text ended" : "the most tokens were reached";
    say("status", `${usage.completion_tokens} tokens in ${short(seconds)} s, ${speed} per second; ${end}.`);
  } catch (error) {
    if (controller.signal.aborted) say("status", "Stopped.");
    else say("status", `Error: ${error.message}`, true);
    if (error.status === 401) askForKey();
  }
  output.ariaBusy = "false";
  generating = null;
  get("generate").disabled = false;
  if (document.activeElement === get("stop")) get("generate").focus();
  get("stop").disabled = true;
}

get("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!generating) generate();
});
get("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) get("form").requestSubmit();
});
get("stop").addEventListener("click", () => generating?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") generating?.abort();
});

// The plots.

let watching = null;
let received = []; // The events of the last minute, each with its second.
let drawn = -Infinity;

async function watch() {
  watching?.abort();
  const controller = new AbortController();
  watching = controller;
  while (!controller.signal.aborted) {
    try {
      const { model, backend, device, status } = await (await fetch("/health")).json();
      say("server", model ? `Model ${model}, ${backend} backend on ${device}` : `The server is ${status}`);
      for await (const data of events("/v1/stats", { headers: authorization(), signal: controller.signal })) {
        get("key-form").hidden = true;
        show(JSON.parse(data));
      }
      say("server", "The server has ended the figures; trying again", true);
    } catch (error) {
      if (controller.signal.aborted) return;
      if (error.status === 401) {
        say("server", "The server asks for its API key", true);
        askForKey();
        return;
      }
      say("server", error instanceof HttpError ? error.message : "The server does not answer", true);
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

function show(stats) {
  const now = performance.now() / 1000;
  received.push({ ...stats, second: now });
  received = received.filter(({ second }) => second > now - WINDOW_SECONDS);
  if (reduced.matches && now - drawn < 5) return;
  drawn = now;
  const points = (value) => received.map((event) => [event.second, value(event)]);
  const label = (id, text) => get(id).setAttribute("aria-label", text);
  const ms = (value) => (value === null ? "none" : `${short(value)} ms`);

  say("speed", `${short(stats.tokens_per_second)} tokens per second`);
  lines(get("steps"), [points((e) => e.decode_ms), points((e) => e.prefill_ms)], now, "milliseconds", 1);
  label("steps", `Step time: decode ${ms(stats.decode_ms)}, prefill ${ms(stats.prefill_ms)}`);
  lines(get("batch"), [points((e) => e.batch_size ?? 0), points((e) => e.waiting)], now, "requests", 2);
  label("batch", `Batch size: ${stats.batch_size ?? 0} decoding, ${stats.waiting} waiting`);
  lines(get("cache"), [points((e) => (100 * e.pages_used) / e.pages)], now, "% of pages", 0, 100);
  label("cache", `Cache use: ${stats.pages_used} of ${stats.pages} pages`);

  const recent = received.filter(({ second }) => second > now - EXPERT_SECONDS);
  const load = stats.expert_tokens.map((_, i) => recent.reduce((sum, e) => sum + e.expert_tokens[i], 0));
  bars(get("experts"), load, "tokens", "expert");
  label("experts", `Tokens of each expert in the last ${EXPERT_SECONDS} seconds: ${load.join(", ")}`);
}

get("live").addEventListener("change", (event) => (event.target.checked ? watch() : watching.abort()));
get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = get("key").value;
  get("key").value = "";
  get("key-form").hidden = true;
  get("prompt").focus();
  if (get("live").checked) watch();
});

watch();
