// Bundles the page's program and style into dist/, with the licences of what is in them: what cargo embeds. With a folder as
// argument it writes there instead, so that a fresh bundle can be compared with the committed one.
import { build } from "esbuild";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

const out = process.argv[2] ?? "dist";
const { dependencies } = JSON.parse(await readFile("package.json", "utf8"));
await mkdir(out, { recursive: true });
await build({
  entryPoints: { page: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "ascii",
  banner: { js: `/* Altiplano's page of a plan, with ${Object.keys(dependencies).join(", ")}: see LICENSES.txt beside its sources. */` },
});
let licences = "";
for (const [name, version] of Object.entries(dependencies)) {
  licences += `${name} ${version}\n\n${await readFile(join("node_modules", name, "LICENSE"), "utf8")}\n`;
}
await writeFile(join(out, "LICENSES.txt"), licences);
