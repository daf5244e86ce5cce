// What `nox -s pages` runs: opens README, site and report in Chromium as people see them, and says what is wrong there.
//
//   node check.mjs CHROMIUM ROOT REPORT OUT [PAGE...]
//
// CHROMIUM is the browser, ROOT the repository with its site built, REPORT the HTML page that the demo wrote, and OUT the
// folder for screenshots. Of the site those pages are looked at that are named, all if none is. The exit code is 1 if
// anything is wrong, or if a page that is wrong on purpose passes.

import { mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, relative, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { marked } from "marked";
import { chromium } from "playwright-core";

const require = createRequire(import.meta.url);
const [executablePath, root, report, out] = process.argv.slice(2, 6).map((path) => resolve(path));
const named = process.argv.slice(6);
const WIDTHS = [1280, 400];
const TALLEST = { site: 2500, other: 12000 }; // pixels of a screenshot
const TABS = 2; // pages that are open beside each other

/** Return what is wrong with the page's layout and images; runs in the page. */
function look() {
  const name = (element) => {
    const text = (element.textContent || element.getAttribute("src") || "").trim().replace(/\s+/g, " ");
    return `<${element.localName}${element.classList.length ? `.${element.classList[0]}` : ""}> ${text.slice(0, 50)}`;
  };
  const wrong = [];
  const { scrollWidth } = document.scrollingElement;
  if (scrollWidth > innerWidth) {
    const beyond = [...document.body.querySelectorAll("*")].filter(
      (element) => element.getBoundingClientRect().right > innerWidth + 1 && !element.closest("[hidden]"),
    );
    wrong.push(`scrolls sideways: ${scrollWidth} of ${innerWidth} px; ${beyond.slice(-2).map(name).join("; ")}`);
  }
  const cutting = ["hidden", "clip", ...(matchMedia("print").matches ? ["auto", "scroll"] : [])]; // paper does not scroll
  for (const element of document.querySelectorAll("td, td *, th, th *, :has(> table)")) {
    const cuts = cutting.includes(getComputedStyle(element).overflowX);
    if (cuts && element.clientWidth && element.scrollWidth > element.clientWidth) {
      wrong.push(`cut: ${name(element)}`);
    }
  }
  for (const image of document.images) {
    if (!image.alt.trim()) wrong.push(`image without alternative text: ${name(image)}`);
    if (!image.complete || !image.naturalWidth) wrong.push(`image that does not load: ${image.src}`);
  }
  return wrong;
}

/** Return what axe finds against WCAG's levels A and AA, contrast among them; runs in the page. */
async function accessibility() {
  const { violations } = await axe.run(document, { runOnly: ["wcag2a", "wcag2aa"], resultTypes: ["violations"] });
  return violations.map(({ id, help, nodes }) => {
    const [first] = nodes;
    const { contrastRatio, fgColor, bgColor } = first.any[0]?.data ?? {};
    const figures = contrastRatio ? `, ${contrastRatio} to 1, ${fgColor} on ${bgColor}` : "";
    return `${id} (${help}${figures}), ${nodes.length} times: ${first.target.join(" ")} ${first.html.slice(0, 120).replace(/\s+/g, " ")}`;
  });
}

/** Wrap README.md as GitHub shows it, links underlined and code in reach of the keyboard; return the page's address. */
async function readme() {
  const style = await readFile(require.resolve("github-markdown-css"), "utf8");
  const body = marked.parse(await readFile(join(root, "README.md"), "utf8")).replaceAll("<pre>", '<pre tabindex="0">');
  const page = `<!doctype html><html lang="en"><head><meta charset="utf-8"><title>README</title>
<meta name="viewport" content="width=device-width"><base href="${pathToFileURL(root)}/"><style>${style}
body { margin: 0 } article.markdown-body { max-width: 1012px; margin: auto; padding: 32px; box-sizing: border-box }
article.markdown-body a { text-decoration: underline } @media (max-width: 767px) { article.markdown-body { padding: 16px } }
</style></head>
<body><article class="markdown-body">${body}</article></body></html>`;
  await writeFile(join(out, "readme.html"), page);
  return pathToFileURL(join(out, "readme.html")).href;
}

/** Open an address, look at it at some widths, keep a screenshot of each, and return what is wrong there. */
async function check({ url, name, widths = WIDTHS, colorScheme = "light", media = "screen" }) {
  const page = await (await contexts[colorScheme]).newPage();
  await page.emulateMedia({ media });
  page.setDefaultTimeout(120_000); // a busy machine is no finding
  const wrong = [];
  for (const width of widths) {
    await page.setViewportSize({ width, height: 900 });
    if (width === widths[0]) {
      await page.goto(url);
      await page.addScriptTag({ path: require.resolve("axe-core/axe.min.js") });
      // Or another width is looked at while colours still change.
      await page.addStyleTag({ content: "*, *::before, *::after { transition: none !important; animation: none !important }" });
    }
    const found = [...(await page.evaluate(look)), ...(await page.evaluate(accessibility))];
    wrong.push(...found.map((text) => `${name} at ${width} px: ${text}`));
    const most = name.startsWith("site") ? TALLEST.site : TALLEST.other;
    const height = Math.min(most, await page.evaluate(() => document.documentElement.scrollHeight));
    const path = join(out, `${name}-${width}.png`);
    await page.screenshot({ path, fullPage: true, clip: { x: 0, y: 0, width, height } });
  }
  await page.close();
  return wrong;
}

// Wrong in every way that is looked for: a check that does not find it proves nothing.
const BROKEN = `<!doctype html><html lang="en"><title>Wrong</title><body>
<p style="color: #aaa; background: #fff">pale</p><img src="docs/images/smollm.svg"><img src="none.svg" alt="none">
<table><tr><td><div style="width: 3000px">wide</div></td></tr></table>
<table style="table-layout: fixed; width: 90px"><tr><td style="overflow: hidden"><div style="width: 200px">cut</div></td></tr></table>`;
const FINDINGS = ["scrolls sideways", "cut", "image without", "image that does not load", "color-contrast", "image-alt"];

await mkdir(out, { recursive: true });
await writeFile(join(out, "broken.html"), BROKEN);
const browser = await chromium.launch({
  executablePath,
  chromiumSandbox: process.getuid() !== 0, // which root cannot have
  args: ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update"],
});
// Apart, because the site remembers the scheme of the last view.
const contexts = Object.fromEntries(["light", "dark"].map((colorScheme) => [colorScheme, browser.newContext({ colorScheme })]));
const jobs = [];
const add = (name, url) => jobs.push({ name, url }, { name: `${name}-dark`, url, colorScheme: "dark" });
add("readme", await readme());
const demo = pathToFileURL(report).href;
add("report", demo);
jobs.push({ name: "report-print", url: demo, widths: [700], media: "print" }); // A4 between its margins
const site = join(root, ".cache", "site");
for (const file of await readdir(site, { recursive: true })) {
  if (!file.endsWith(".html") || file === "404.html") continue;
  if (named.length && !named.includes(file.replaceAll("\\", "/"))) continue;
  const name = `site-${relative(".", file).replaceAll(/[/\\]/g, "-").replace(".html", "")}`;
  const url = pathToFileURL(join(site, file)).href;
  if (/CHANGELOG|decisions/.test(file)) jobs.push({ name, url }); // text in a frame that others have in both schemes
  else add(name, url);
}

const found = await check({ name: "broken", url: pathToFileURL(join(out, "broken.html")).href, widths: [400] });
let failures = 0;
for (const finding of FINDINGS.filter((kind) => !found.some((text) => text.includes(`px: ${kind}`)))) {
  console.log(`the page that is wrong on purpose passes: no "${finding}" among ${found.join("; ")}`);
  failures += 1;
}
const total = jobs.flatMap(({ widths = WIDTHS }) => widths).length;
async function work() {
  for (let job = jobs.shift(); job; job = jobs.shift()) {
    for (const text of await check(job)) {
      console.log(text);
      failures += 1;
    }
  }
}
await Promise.all(Array.from({ length: TABS }, work));
await browser.close();
console.log(`${total} views, ${failures} findings; screenshots in ${relative(process.cwd(), out)}`);
process.exit(failures ? 1 : 0);
