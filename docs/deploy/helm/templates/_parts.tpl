{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.security" -}}
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
runAsNonRoot: true
{{- end }}

{{- /* A key file must be its owner's alone, and those of a Secret are root's. */ -}}
{{- define "headrace.initContainers" -}}
- name: keys
  image: {{ .Values.image }}
  command: [install, -m, "0400", /secret/deployment.keys, /keys/deployment.keys]
  volumeMounts:
    - {name: secret, mountPath: /secret, readOnly: true}
    - {name: keys, mountPath: /keys}
{{- end }}

{{- define "headrace.volumes" -}}
- name: secret
  secret: {secretName: {{ .Values.keysSecret }}}
- name: keys
  emptyDir: {medium: Memory}
{{- end }}

{{- define "headrace.engineContainer" -}}
image: {{ .Values.image }}
env:
  - {name: HEADRACE_KEYS, value: /keys/deployment.keys}
  - {name: HOME, value: /tmp}
ports:
  - {name: engine, containerPort: {{ .Values.engines.port }}}
{{- /* A model may take long to be read. The engine says itself that it is there. */}}
startupProbe:
  exec: {command: [headrace, ps, --engine, "tcp://127.0.0.1:{{ .Values.engines.port }}"]}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 180
readinessProbe:
  exec: {command: [headrace, ps, --engine, "tcp://127.0.0.1:{{ .Values.engines.port }}"]}
  periodSeconds: 15
  timeoutSeconds: 10
livenessProbe:
  exec: {command: [headrace, ps, --engine, "tcp://127.0.0.1:{{ .Values.engines.port }}"]}
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 4
resources: {{- toYaml .Values.engines.resources | nindent 2 }}
volumeMounts: {{- include "headrace.engineMounts" . | nindent 2 }}
{{- end }}

{{- define "headrace.engineMounts" -}}
- {name: keys, mountPath: /keys, readOnly: true}
{{- if .Values.modelVolumeClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "headrace.engineVolumes" -}}
{{ include "headrace.volumes" . }}
{{- if .Values.modelVolumeClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.modelVolumeClaim }}, readOnly: true}
{{- end }}
{{- end }}
