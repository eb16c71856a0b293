// What is under the pointer, beside it and within the window.

export interface Tip { x: number; y: number; lines: string[] }

export function Tooltip({ tip }: { tip: Tip | null }) {
  if (!tip) return null;
  const left = tip.x > innerWidth / 2, up = tip.y > innerHeight * 0.7;
  const style = {
    left: left ? undefined : `${tip.x + 14}px`, right: left ? `${Math.max(0, innerWidth - tip.x + 14)}px` : undefined,
    top: up ? undefined : `${tip.y + 14}px`, bottom: up ? `${innerHeight - tip.y + 14}px` : undefined,
  };
  return <div class="tooltip" role="tooltip" style={style}>{tip.lines.map((line) => <div key={line}>{line}</div>)}</div>;
}
