{{- define "penstock.name" -}}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The options as TOML, which has JSON's texts and booleans. A map, such as default_sampling, is a text with JSON. */}}
{{- define "penstock.toml" -}}
host = "0.0.0.0"
port = 8000
{{- range $name, $value := .Values.config }}
{{ $name }} = {{ if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}{{ else if kindIs "map" $value }}{{ toJson $value | toJson }}{{ else }}{{ toJson $value }}{{ end }}
{{- end }}
{{- if .Values.apiKeysSecret }}
api_keys = "/etc/penstock-keys/keys.toml"
{{- end }}
{{- end }}
