package sshconfig

// ignored are the keywords that decide nothing here, and those that would weaken the
// check of host keys, which is always made.
var ignored = set(
	// how host keys are checked
	"stricthostkeychecking", "checkhostip", "updatehostkeys", "verifyhostkeydns", "visualhostkey", "hashknownhosts",
	"globalknownhostsfile", "nohostauthenticationforlocalhost", "fingerprinthash",
	// authentication by anything but the keys that are named
	"identitiesonly", "batchmode", "passwordauthentication", "kbdinteractiveauthentication", "kbdinteractivedevices",
	"challengeresponseauthentication", "hostbasedauthentication", "enablesshkeysign", "numberofpasswordprompts",
	"preferredauthentications", "pubkeyauthentication", "gssapiauthentication", "gssapidelegatecredentials",
	"addkeystoagent", "usekeychain",
	// times, which are kvm2's own
	"connectionattempts", "connecttimeout", "serveraliveinterval", "serveralivecountmax", "tcpkeepalive", "rekeylimit",
	// shared connections
	"controlmaster", "controlpath", "controlpersist",
	// what is forwarded, and what runs on a terminal
	"clearallforwardings", "exitonforwardfailure", "dynamicforward", "localforward", "remoteforward", "gatewayports",
	"forwardagent", "forwardx11", "forwardx11timeout", "forwardx11trusted", "xauthlocation", "permitremoteopen", "streamlocalbindmask",
	"streamlocalbindunlink", "tunnel", "tunneldevice", "escapechar", "enableescapecommandline", "requesttty", "sendenv", "setenv",
	"sessiontype", "stdinnull", "forkafterauthentication", "permitlocalcommand", "localcommand", "remotecommand",
	// the rest
	"compression", "ipqos", "loglevel", "logverbose", "syslogfacility", "obscurekeystroketiming", "channeltimeout",
)

// harmless are values of keywords that are not supported otherwise.
var harmless = map[string]string{
	"addressfamily":        "any",
	"canonicalizehostname": "no",
	"certificatefile":      "none",
	"knownhostscommand":    "none",
	"pkcs11provider":       "none",
	"proxyusefdpass":       "no",
	"revokedhostkeys":      "none",
}

func set(words ...string) map[string]bool {
	s := map[string]bool{}
	for _, w := range words {
		s[w] = true
	}
	return s
}
