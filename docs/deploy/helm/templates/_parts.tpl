{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.security" -}}
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Pod Security "restricted", and a root file system that nothing writes to. */ -}}
{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* A key file must be its owner's alone, and those of a Secret are root's. */ -}}
{{- define "headrace.initContainers" -}}
- name: keys
  image: {{ .image }}
  securityContext: {{- include "headrace.containerSecurity" . | nindent 4 }}
  command: [install, -m, "0400", /secret/{{ .file }}, /keys/{{ .file }}]
  volumeMounts:
    - {name: secret, mountPath: /secret, readOnly: true}
    - {name: keys, mountPath: /keys}
{{- end }}

{{- define "headrace.volumes" -}}
- name: secret
  secret: {secretName: {{ .secret }}}
- name: keys
  emptyDir: {medium: Memory}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "headrace.engineContainer" -}}
image: {{ .Values.image }}
securityContext: {{- include "headrace.containerSecurity" . | nindent 2 }}
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
{{ include "headrace.nodeMounts" . }}
{{- end }}

{{- /* A host that is not its engine's first needs no keys: clients do not reach it. */ -}}
{{- define "headrace.nodeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.modelVolumeClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "headrace.engineVolumes" -}}
{{ include "headrace.volumes" (dict "secret" .Values.keysSecret) }}
{{- include "headrace.modelVolume" . }}
{{- end }}

{{- define "headrace.modelVolume" -}}
{{- if .Values.modelVolumeClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.modelVolumeClaim }}, readOnly: true}
{{- end }}
{{- end }}
