// Opens pages of plans in a headless browser, uses them as a reader would, and compares what they show with what the text report
// and the simulator say of the same plans. Arguments: the altiplano binary, the browser, the folder in which playwright-core is
// installed, a folder for pages, and plan files.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync, statSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";

const [altiplano, browserPath, modules, scratch, ...plans] = process.argv.slice(2);
const { chromium } = createRequire(resolve(modules, "package.json"))("playwright-core");
const run = (...words) => execFileSync(altiplano, words, { encoding: "utf8", maxBuffer: 1 << 30 });

/** The cells of a table of the text report, by its title. */
function table(report, title) {
  const lines = report.split("\n"), at = lines.findIndex((line) => line.startsWith(title));
  assert.ok(at >= 0, `the report has no ${title}`);
  const rows = [];
  for (let i = at + 2; i < lines.length && /^  \S|^   +\S/.test(lines[i]); i++) rows.push(lines[i].trim().split(/ {2,}/));
  return rows;
}

async function cells(page, selector) {
  return page.$$eval(`${selector} tbody tr`, (rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim())));
}

async function open(browser, file, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage(), problems = [];
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  page.on("pageerror", (error) => problems.push(error.message));
  page.on("dialog", (dialog) => { problems.push(`a dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("request", (request) => request.url().startsWith("file:") || request.url().startsWith("data:") || problems.push(`a request of ${request.url()}`));
  await page.goto(`file://${file}`);
  await page.waitForSelector("main");
  return { page, context, problems };
}

/** What the page shows against what the report says in the same words. */
async function agrees(page, file) {
  const report = run("inspect", file), simulated = JSON.parse(run("simulate", file, "--json")), plan = JSON.parse(run("inspect", file, "--json"));
  const [, step] = report.match(/predicted (?:step |batch) (\S+ \S+) =/);
  assert.equal(await page.innerText(".tiles li:nth-child(1) b"), step);
  // Each row of the report ends with a bar, and the table with what its letters mean.
  const bytes = table(report, "Bytes on each device").filter((row) => row[0].startsWith("stage")).map((row) => row.slice(0, 7));
  const peaks = await cells(page, ".peaks");
  assert.equal(peaks.length, bytes.length);
  peaks.forEach((row, i) => assert.deepEqual([row[0], ...row.slice(2)], bytes[i]));
  // Stages that share devices are a lane, which waits as each of them is said to.
  if ((plan.virtual_stages ?? 1) === 1) {
    const times = table(report, "Seconds of a"), goes = await cells(page, ".goes");
    goes.forEach((row, i) => assert.deepEqual([row[0], ...row.slice(2)], times[i].slice(0, 4)));
  }
  const lines = table(report, "Alternatives"), shown = await cells(page, ".alternatives");
  assert.equal(shown.length, lines.length);
  shown.forEach((row, i) => {
    const [name, seconds, , , samples, mfu, gigabytes, fits, how] = row.map((cell) => (cell === "\u2013" ? "-" : cell));
    assert.deepEqual([name, seconds, samples, mfu, gigabytes, fits, how], lines[i]);
  });
  // Where each lane's calls, put together in the browser, end.
  const data = JSON.parse(await page.textContent("#data"));
  data.lanes.forEach((lane, i) => {
    const busy = lane.calls.reduce((sum, [kind]) => sum + lane.kinds[kind].seconds, 0);
    assert.ok(Math.abs(busy - simulated.stages[i].busy_s) <= 1e-9 * busy, `lane ${i} works ${busy}`);
  });
  assert.ok(Math.abs(data.plan.step_s - plan.predicted.step_time_s) <= 1e-12);
}

const box = (page) => page.locator(".timeline .scroller").boundingBox();
const drawn = (page) => page.$eval(".timeline canvas", (canvas) => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(canvas.toDataURL())))));

/** Uses everything that can be used. */
async function used(page) {
  const status = () => page.innerText(".selected"), timeline = page.locator(".timeline .scroller");
  const whole = await drawn(page), data = JSON.parse(await page.textContent("#data")), stages = data.stages.length;
  // By keyboard alone, from the top of the page.
  let reached = false;
  for (let i = 0; i < 400 && !reached; i++) {
    await page.keyboard.press("Tab");
    reached = await page.evaluate(() => document.activeElement?.classList.contains("scroller"));
  }
  assert.ok(reached, "the timeline is not reached by keyboard");
  await page.keyboard.press("ArrowRight");
  assert.match(await status(), /^stage0, forward 0.*: /);
  await page.keyboard.press("ArrowDown");
  if (data.lanes.length > 1) assert.match(await status(), /^stage1/);
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("Home");
  await page.keyboard.press("Enter");
  const near = await drawn(page);
  assert.notEqual(near, whole, "Enter does not zoom");
  // The call that is zoomed to fills the row.
  await timeline.scrollIntoViewIfNeeded();
  const at = await box(page), y = at.y + 34;
  await page.mouse.move(at.x + at.width * 0.6, y);
  assert.match(await page.innerText(".tooltip"), /forward 0/);
  await page.keyboard.press("0");
  assert.equal((await drawn(page)).length > 0, true);
  await page.mouse.move(at.x + at.width * 0.5, y);
  await page.keyboard.down("Control");
  await page.mouse.wheel(0, -600);
  await page.keyboard.up("Control");
  const zoomed = await drawn(page);
  assert.notEqual(zoomed, whole, "Ctrl and wheel do not zoom");
  await page.mouse.down();
  await page.mouse.move(at.x + at.width * 0.4, y, { steps: 5 });
  await page.mouse.up();
  assert.notEqual(await drawn(page), zoomed, "dragging does not pan");
  await page.click("text=whole step");
  await timeline.focus();
  await page.keyboard.press("Escape");
  await page.mouse.move(5, 5);
  assert.match(await status(), /Nothing is selected/);
  assert.equal(await drawn(page), whole, "the whole step is drawn otherwise than at first");
  // A kernel under the pointer, in the row below the calls.
  await page.setChecked(".timeline input[type=checkbox]", true);
  await timeline.focus();
  for (const key of ["ArrowRight", "Home", "Enter"]) await page.keyboard.press(key);
  const again = await box(page);
  const kind = data.lanes[0].kinds[data.lanes[0].calls[0][0]], [which, , gap] = data.bodies[kind.body].find(([op]) => !data.ops[op].sends);
  const op = data.ops[which], left = again.x + 1 + 128, scale = (again.width - 2 - 128) / (kind.seconds * 1.1);
  const start = Math.max(0, data.lanes[0].calls[0][2] - kind.seconds / 20);
  await page.mouse.move(left + (data.lanes[0].calls[0][2] - start + gap + op.seconds / 2) * scale, again.y + 22 + 28);
  assert.match(await page.innerText(".tooltip"), new RegExp(`${op.what.split(" ")[0]}: `));
  // Layers unfold to their ops.
  const summary = page.locator("#class0 summary");
  await summary.focus();
  await page.keyboard.press("Enter");
  await page.waitForSelector("#class0 table");
  assert.equal(await page.locator("#class0 tbody tr:not(.reshard)").count(), data.layers.classes[0].ops.length);
  // A proved value unfolds to the steps that it follows from.
  const proved = data.layers.classes[0].ops.find((op) => op.fact !== null);
  if (proved) {
    const facts = data.layers.classes[0].facts, steps = new Set([proved.fact]);
    for (const step of steps) for (const from of facts[step].from) steps.add(from);
    await page.locator("#class0 button", { hasText: "proof" }).first().click();
    assert.equal(await page.locator("#class0 .proof li").count(), Math.min(steps.size, 60) + (steps.size > 60 ? 1 : 0));
    await page.locator("#class0 button", { hasText: "proof" }).first().click();
    assert.equal(await page.locator("#class0 .proof").count(), 0);
  }
  // Parameters are sorted and narrowed.
  const heads = page.locator(".parameters thead th"), bytesAt = (await heads.allInnerTexts()).indexOf("local bytes");
  await heads.nth(bytesAt).locator("button").click();
  assert.equal(await heads.nth(bytesAt).getAttribute("aria-sort"), "descending");
  const largest = Math.max(...data.parameters.rows.map((row) => row.local_bytes));
  const first = (await cells(page, ".parameters"))[0];
  assert.ok(data.parameters.rows.some((row) => row.local_bytes === largest && row.name === first[0]), "the largest is not first");
  await heads.nth(bytesAt).locator("button").click();
  assert.equal(await heads.nth(bytesAt).getAttribute("aria-sort"), "ascending");
  const word = `stage${stages - 1}`;
  await page.fill(".parameters input", word);
  const expected = data.parameters.rows.filter((row) => row.stage === stages - 1).length;
  const found = await cells(page, ".parameters");
  assert.ok(found.length <= 100 || found.length === expected);
  assert.ok(found.every((row) => row[3].startsWith(word)), "the filter lets others through");
  await page.fill(".parameters input", "no such thing");
  assert.equal((await cells(page, ".parameters")).length, 0);
  await page.fill(".parameters input", "");
  // From a parameter to what its other layouts cost.
  const asked = data.parameters.rows.find((row) => row.why !== null);
  if (asked) {
    await page.fill(".parameters input", asked.name);
    // A parameter that several stages have is a row of each.
    const at = (await cells(page, ".parameters")).findIndex((row) => row[0] === asked.name && row[3] === `stage${asked.stage}`);
    await page.locator(".parameters tbody tr").nth(at).locator("button.link").click();
    assert.equal(await page.inputValue(".why select"), `${asked.why}`);
    assert.match(await page.innerText(".why tr.chosen"), /taken/);
    assert.equal((await cells(page, ".why")).length, data.questions.answers[asked.why].layouts.length);
  }
  // The memory of another lane.
  const last = data.lanes.length - 1;
  await page.selectOption(".memory select", `${last}`);
  assert.equal(await page.locator(".peaks tr.chosen").innerText().then((text) => text.startsWith(data.lanes[last].name)), true);
  // Dark and light.
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  await page.locator(".theme label", { hasText: "dark" }).click();
  const dark = await paper();
  await page.locator(".theme label", { hasText: "light" }).click();
  assert.notEqual(await paper(), dark, "dark and light are the same");
}

const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox"] });
try {
  for (const [i, file] of plans.entries()) {
    const out = join(scratch, `${i}.html`);
    run("inspect", file, "--html", out);
    const size = statSync(out).size;
    assert.ok(size < 5e6, `${file}: the page has ${size} bytes`);
    const { page, context, problems } = await open(browser, out);
    const opened = await page.evaluate(() => performance.getEntriesByName("interactive")[0].startTime);
    await agrees(page, file);
    await used(page);
    await page.emulateMedia({ media: "print" });
    assert.equal(await page.isVisible("nav"), false, "the navigation is printed");
    await page.emulateMedia({ media: "screen" });
    await page.setViewportSize({ width: 390, height: 800 });
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "the page is wider than a narrow window");
    assert.deepEqual(problems, []);
    await context.close();
    const dark = await open(browser, out, { colorScheme: "dark" });
    assert.notEqual(await dark.page.evaluate(() => getComputedStyle(document.body).backgroundColor), "rgb(255, 255, 255)", "the system's dark colours are not taken");
    await dark.context.close();
    const plan = JSON.parse(readFileSync(file, "utf8"));
    console.log(`ok           ${plan.stages.length} stages, ${plan.num_microbatches} microbatches: ${size} bytes, interactive after ${opened.toFixed(0)} ms`);
  }

  // A model whose names are markup.
  const hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--";
  // The model is called as its file, which has no slash.
  const title = "<script>alert(1)<!--", graph = join(scratch, `${title}.json`), plan = join(scratch, "hostile.json"), out = join(scratch, "hostile.html");
  const rename = (value, key) => {
    if (Array.isArray(value)) return value.map((v) => rename(v));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, rename(v, k)]));
    return typeof value === "string" && key === "name" ? `${hostile}${value}` : value;
  };
  run("import", "examples/models/gpt-small-demo.mlir", "-o", graph);
  writeFileSync(graph, JSON.stringify(rename(JSON.parse(readFileSync(graph, "utf8")))));
  run("plan", graph, "--cluster", "local:2", "--pp", "2", "-o", plan);
  run("inspect", plan, "--html", out);
  const { page, problems } = await open(browser, out);
  await page.locator("details summary").first().click();
  assert.ok((await page.innerText("h1")).includes(title), "the name is not shown as text");
  assert.ok((await page.innerText(".parameters tbody")).includes("<img src=x onerror=alert(2)>"));
  assert.equal(await page.locator("img").count(), 0);
  assert.equal(await page.locator("script").count(), 2);
  await page.waitForTimeout(200);
  assert.deepEqual(problems, []);
  console.log("ok           names that are markup are shown as text");
} finally {
  await browser.close();
}
