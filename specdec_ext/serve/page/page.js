// Asks the server for its state once per second and shows it; sends the prompt and shows the text as it comes.
// Texts are those of a model and of users: they are only ever set as text, never as HTML.
"use strict";

const PERIOD = 1000; // milliseconds between two states
const SHOWN = 180, FEWEST = 30; // seconds that the chart of tokens per second covers: at most, at first
const $ = (id) => document.getElementById(id);
const whole = (number) => Math.round(number).toLocaleString("en");
const counted = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

let key = ""; // of the server's API; in memory only
let last = null; // the last state; null if the next one has no predecessor
let rates = []; // [uptime, tokens per second]
let running = null; // the AbortController of the request that runs

// --- the state of the server

async function poll() {
  try {
    const options = { headers: authorization(), cache: "no-store", signal: AbortSignal.timeout(5000) };
    const answer = await fetch("state", options);
    if (answer.status === 401) return askForKey();
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
  } catch {
    last = null;
    report("The server can't be reached. It may have been stopped; this page goes on when it is back.", true);
  }
  setTimeout(poll, PERIOD);
}

const authorization = () => (key ? { Authorization: `Bearer ${key}` } : {});

function askForKey() {
  report(key ? "The key is wrong." : "The server needs a key.", true);
  $("unlock").hidden = false;
  $("key").focus();
}

function report(text, isBad) {
  if ($("status").textContent !== text) $("status").textContent = text; // screen readers read each change
  $("status").classList.toggle("bad", isBad);
  document.body.classList.toggle("lost", isBad);
}

function show(state) {
  if (state.is_open) report("accepting requests", false);
  else report("The server is shutting down and accepts no requests any more.", true);
  $("model").textContent = state.model;
  $("about").textContent = `drafter ${state.drafter}, speculation ${state.speculation}`;
  $("modes").hidden = !state.chat;

  if (rates.length && state.uptime < rates.at(-1)[0]) rates = []; // another server
  if (last && state.uptime > last.uptime) {
    const tokens = state.generation_tokens - last.generation_tokens;
    rates.push([state.uptime, tokens / (state.uptime - last.uptime)]);
    rates = rates.filter(([time]) => time >= state.uptime - SHOWN);
    $("rate").textContent = whole(rates.at(-1)[1]);
  }
  $("running").textContent = `${state.running} / ${state.max_rows}`;
  $("waiting").textContent = state.waiting;
  $("cached").textContent =
    whole(state.cached_tokens) + (state.max_tokens === null ? "" : ` / ${whole(state.max_tokens)}`);
  $("totals").textContent = `Since the start: ${counted(state.prompt_tokens, "prompt token")}, ` +
    `${counted(state.generation_tokens, "generated token")}.`;
  last = state;
  draw();
  showDecision(state);
}

function showDecision({ speculation, decision, steps, probes }) {
  let text = "The controller measures plain steps first; it has chosen nothing yet.";
  if (speculation === "none") text = "There is no drafter: every step is a plain step.";
  if (speculation === "fixed") text = "Every step drafts (speculation fixed): there is nothing to choose.";
  if (decision) {
    text = `Last choice, for ${counted(decision.rows, "row")}: ${decision.chosen}. ` +
      (decision.pays ? "" : "Drafts have lost more time than they gained, so they are only tried. ") +
      `${counted(probes, "step")} tried something else.`;
  }
  $("decision").textContent = text;
  const estimates = decision ? decision.estimates : [];
  const others = Object.keys(steps).filter((name) => !estimates.some((each) => each.name === name));
  $("estimates").replaceChildren(...[...estimates, ...others.map((name) => ({ name }))].map((each) => {
    const isChosen = decision !== null && each.name === decision.chosen;
    const row = document.createElement("tr");
    row.classList.toggle("chosen", isChosen);
    const { name, tokens, seconds, rate } = each;
    const cells = [isChosen ? `${name} ◂ chosen` : name, tokens?.toFixed(2), seconds && (seconds * 1e3).toFixed(2),
      rate && whole(rate), whole(steps[name] ?? 0)];
    for (const cell of cells) row.insertCell().textContent = cell ?? "";
    return row;
  }));
  document.querySelector(".scroll").hidden = !$("estimates").children.length;
}

// --- charts

function draw() {
  if (!last || !$("positions").clientWidth) return; // no state, or no room yet
  drawPositions(last);
  drawRates(last.uptime);
}

// An empty chart: a scale for y from 0 to `top`, and the functions that place and add things in it.
function chart(svg, top, unit) {
  svg.replaceChildren();
  const [left, right, high, low] = [44, svg.clientWidth - 8, 14, svg.clientHeight - 36];
  const y = (value) => low - (low - high) * (value / top);
  const add = (name, attributes, text, parent = svg) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [each, value] of Object.entries(attributes)) made.setAttribute(each, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  for (const value of [0, top / 2, top]) {
    add("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" });
    add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, whole(value) + unit);
  }
  return { left, right, low, y, add };
}

function drawPositions({ drafts, draft_tokens, accepted_tokens, ...state }) {
  const { proposed_per_position: proposed, reached_per_position: reached, accepted_per_position: accepted } = state;
  if (drafts) {
    $("drafts").textContent = `${counted(drafts, "draft")}, mean acceptance length ` +
      `${(1 + accepted_tokens / drafts).toFixed(2)}, ${whole((100 * accepted_tokens) / draft_tokens)} % of draft ` +
      "tokens accepted. Coloured: accepted up to this position; grey: proposed a token there.";
  }
  const { left, right, low, y, add } = chart($("positions"), 100, " %");
  const width = (right - left) / Math.max(accepted.length, 1);
  const every = Math.ceil(24 / width); // positions between two labels
  accepted.forEach((count, i) => {
    const share = (100 * count) / drafts;
    const [x, size] = [left + (i + 0.15) * width, 0.7 * width];
    const bar = add("g", { "data-position": i + 1, "data-share": share.toFixed(1) });
    add("title", {}, `position ${i + 1}: accepted in ${count} of ${drafts} drafts; ` +
      `${proposed[i]} proposed a token there, ${reached[i]} of them with all tokens before it accepted`, bar);
    const all = y((100 * proposed[i]) / drafts);
    add("rect", { x, width: size, y: all, height: low - all, class: "proposed" }, undefined, bar);
    add("rect", { x, width: size, y: y(share), height: low - y(share), class: "accepted" }, undefined, bar);
    if (i % every) return;
    add("text", { x: x + size / 2, y: low + 15, "text-anchor": "middle" }, i + 1);
    if (width > 30) add("text", { x: x + size / 2, y: y(share) - 4, "text-anchor": "middle" }, whole(share));
  });
  add("text", { x: (left + right) / 2, y: low + 32, "text-anchor": "middle" }, "position in the draft");
  const shares = accepted.map((count, i) => `${i + 1}: ${whole((100 * count) / drafts)} %`);
  $("positions").setAttribute("aria-label", `Share of drafts accepted up to each position. ${shares.join(", ")}`);
}

function drawRates(now) {
  const most = Math.max(10, ...rates.map(([, rate]) => rate));
  const step = 10 ** Math.floor(Math.log10(most));
  const { left, right, low, y, add } = chart($("rates"), Math.ceil(most / step) * step, "");
  const span = Math.max(FEWEST, now - (rates[0]?.[0] ?? now));
  const points = rates.map(([time, rate]) => `${right - ((now - time) / span) * (right - left)},${y(rate)}`);
  if (points.length) {
    const [first, end] = [points[0].split(",")[0], right];
    add("polygon", { points: `${first},${low} ${points.join(" ")} ${end},${low}`, class: "area" });
    add("polyline", { points: points.join(" "), class: "curve" });
  }
  add("text", { x: left, y: low + 15 }, `${whole(span)} seconds ago`);
  add("text", { x: right, y: low + 15, "text-anchor": "end" }, "now");
  $("rates").setAttribute("aria-label", `Tokens per second in the last ${whole(span)} seconds, at most ${whole(most)}`);
}

// --- a request

async function complete() {
  const isChat = !$("modes").hidden && $("mode").value === "chat";
  const prompt = $("prompt").value;
  const body = {
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    temperature: $("temperature").valueAsNumber, max_tokens: $("tokens").valueAsNumber, mark_drafted: true,
    stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const began = performance.now();
  const seen = { tokens: 0, reason: null, metrics: null, first: null };
  running = new AbortController();
  setRunning(true);
  try {
    const answer = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", signal: running.signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", ...authorization() },
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const { error, choices, usage, metrics } of events(answer.body)) {
      if (error) throw new Error(error.message);
      for (const choice of choices) {
        append(choice.delta?.reasoning_content ?? "", false);
        for (const { text, drafted } of choice.pieces) append(text, drafted);
        seen.reason ??= choice.finish_reason;
      }
      seen.first ??= performance.now() - began;
      seen.tokens = usage?.completion_tokens ?? seen.tokens;
      seen.metrics = metrics?.speculative_decoding ?? null;
    }
    tell(seen.reason === "length" ? "Ended at max tokens." : "Ended by the model.");
  } catch (error) {
    const isStopped = error.name === "AbortError";
    tell(isStopped ? "Stopped." : `${error.message}.`.replace(/\.\.$/, "."), !isStopped);
  }
  running = null;
  setRunning(false);

  function tell(end, isBad = false) {
    const seconds = (performance.now() - began) / 1000;
    let text = end;
    if (seen.tokens) {
      text += ` ${counted(seen.tokens, "token")} in ${seconds.toFixed(2)} s, ${whole(seen.tokens / seconds)} per ` +
        `second; the first after ${whole(seen.first)} ms.`;
    }
    if (seen.metrics?.num_spec_steps) {
      const { mean_acceptance_length: mean, num_draft_tokens: all, num_accepted_draft_tokens: taken } = seen.metrics;
      text += ` Mean acceptance length ${mean.toFixed(2)} over ${counted(seen.metrics.num_spec_steps, "draft")}; ` +
        `${taken} of ${all} draft tokens accepted.`;
    }
    $("result").textContent = text;
    $("result").classList.toggle("bad", isBad);
  }
}

// The objects of a stream of server-sent events.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const ended = (text + value).split("\n\n");
    text = ended.pop();
    for (const event of ended) if (event !== "data: [DONE]") yield JSON.parse(event.slice("data: ".length));
  }
}

function append(text, drafted) {
  if (!text) return;
  const output = $("output");
  const isAtEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  const name = drafted ? "mark" : "span";
  if (output.lastChild?.localName !== name) output.append(document.createElement(name));
  output.lastChild.append(text);
  if (isAtEnd) output.scrollTop = output.scrollHeight;
}

function setRunning(isRunning) {
  if (isRunning) {
    $("output").replaceChildren();
    $("result").textContent = "";
  }
  $("output").setAttribute("aria-busy", isRunning); // screen readers read the text when it is complete
  $("ask").noValidate = isRunning;
  $("go").textContent = isRunning ? "Stop" : "Complete";
  $("go").classList.toggle("stop", isRunning);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else complete();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) $("ask").requestSubmit();
});
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  $("unlock").hidden = true;
  $("key").value = "";
  poll();
});
new ResizeObserver(draw).observe($("positions"));
poll();
